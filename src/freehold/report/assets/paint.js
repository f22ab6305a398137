// Painting. A view says which ranks (x0 to x1) and which rows (y0 to y1, elements of a rank) a box of pixels shows.

const INK = "#1b1b1b", SOFT = "#5a5a5a", FONT = 'system-ui, "Segoe UI", Arial, sans-serif';
const NARROW = 2; // Below this many pixels a rank, columns of several ranks are drawn, each as the mean of its ranks.

function prepare(canvas, height) {
  const ratio = window.devicePixelRatio || 1;
  const width = canvas.clientWidth;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  canvas.style.height = `${height}px`;
  const ctx = canvas.getContext("2d");
  ctx.setTransform(ratio, 0, 0, ratio, 0, 0);
  ctx.clearRect(0, 0, width, height);
  return ctx;
}

let hatching = null;
function hatch(ctx) {
  if (hatching) return hatching;
  const tile = document.createElement("canvas");
  tile.width = tile.height = 12;
  const t = tile.getContext("2d");
  t.fillStyle = "#fff";
  t.fillRect(0, 0, 12, 12);
  t.strokeStyle = model.paddingLine;
  t.lineWidth = 1.2;
  for (const shift of [-6, 0, 6, 12]) {
    t.beginPath();
    t.moveTo(shift - 1, 13 - 0);
    t.lineTo(shift + 13, -1);
    t.stroke();
  }
  hatching = ctx.createPattern(tile, "repeat");
  return hatching;
}

function scales(view, box) {
  return {
    x: (rank) => box.x + ((rank - view.x0) / (view.x1 - view.x0)) * box.w,
    y: (row) => box.y + ((row - view.y0) / (view.y1 - view.y0)) * box.h,
  };
}

function paintMap(ctx, panel, view, box, style) {
  const { x, y } = scales(view, box);
  ctx.save();
  ctx.beginPath();
  ctx.rect(box.x, box.y, box.w, box.h);
  ctx.clip();
  const left = Math.max(box.x, x(0)), right = Math.min(box.x + box.w, x(model.ranks));
  for (const band of panel.bands) {
    const top = y(band.top), bottom = y(band.top + band.shard);
    if (bottom < box.y || top > box.y + box.h) continue;
    ctx.fillStyle = hatch(ctx);
    ctx.fillRect(left, top, right - left, bottom - top);
    if (box.w / (view.x1 - view.x0) < NARROW) paintColumns(ctx, band, view, box, style);
    else paintBlocks(ctx, band, view, box, style);
  }
  paintEdges(ctx, panel, y, left, right, style);
  ctx.restore();
}

function paintEdges(ctx, panel, y, left, right, style) {
  ctx.lineWidth = 1;
  for (const band of panel.bands) {
    const height = y(band.shard) - y(0), isThin = height < 12; // a wide edge would cover it
    ctx.globalAlpha = Math.min(1, Math.max(0.25, height / 12));
    for (const edge of [band.top, band.top + band.shard]) {
      const at = Math.round(y(edge));
      ctx.fillStyle = "#fff";
      if (!isThin) ctx.fillRect(left, at - (style.small ? 0.5 : 1.5), right - left, style.small ? 1 : 3);
      ctx.fillStyle = INK;
      ctx.fillRect(left, at - 0.5, right - left, isThin || style.small ? 0.5 : 1);
    }
    ctx.globalAlpha = 1;
  }
}

function paintBlocks(ctx, band, view, box, style) {
  const { x, y } = scales(view, box);
  const gap = box.w / (view.x1 - view.x0) >= 7 ? 1 : 0;
  for (let i = 0; i < band.count; i++) {
    if (band.rank[i] + 1 <= view.x0 || band.rank[i] >= view.x1) continue;
    const row = band.top + band.offset[i];
    const top = Math.round(y(row)), bottom = Math.round(y(row + band.stop[i] - band.start[i]));
    if (bottom <= box.y || top >= box.y + box.h || bottom <= top) continue;
    const left = Math.round(x(band.rank[i])), right = Math.round(x(band.rank[i] + 1)) - gap;
    const param = band.param[i];
    const swatch = style.colouring.swatches[style.colouring.of[param]];
    const dim = !style.wanted(param);
    ctx.fillStyle = dim ? "#ececec" : swatch.colour;
    ctx.fillRect(left, top, right - left, bottom - top);
    ctx.fillStyle = "#fff";
    if (gap) ctx.fillRect(right, top, gap, bottom - top);
    if (style.small) continue;
    if (bottom - top >= 4) {
      ctx.fillStyle = "rgba(255,255,255,.85)";
      ctx.fillRect(left, bottom - 1, right - left, 1);
    }
    if (!dim) {
      paintGranules(ctx, band, i, y, left, right);
      paintLabel(ctx, param, swatch, style, left, right, Math.max(top, box.y), Math.min(bottom, box.y + box.h));
    }
  }
}

function paintGranules(ctx, band, i, y, left, right) {
  const granule = model.granules[band.param[i]];
  const numel = band.stop[i] - band.start[i];
  if (granule <= 1 || numel <= granule || y(granule) - y(0) < 5) return;
  ctx.fillStyle = "rgba(255,255,255,.55)";
  for (let at = granule; at < numel; at += granule) {
    ctx.fillRect(left, Math.round(y(band.top + band.offset[i] + at)) - 0.5, right - left, 1);
  }
}

function paintLabel(ctx, param, swatch, style, left, right, top, bottom) {
  if (Math.min(bottom - top, right - left) < 12 || Math.max(bottom - top, right - left) < 16) return;
  const layer = style.colouring.name === "layer" ? "" : model.layers[param];
  const role = style.colouring.name === "role" ? swatch.code : model.roles[param];
  const shape = model.shapes[param];
  const own = swatch.code || shape;
  const choices = [[layer, role, shape], [layer, own], [own]].map((parts) => [...new Set(parts)].filter(Boolean).join(" "));
  ctx.font = `10.5px ${FONT}`;
  ctx.textAlign = "center";
  ctx.textBaseline = "middle";
  ctx.fillStyle = swatch.ink;
  const upright = bottom - top > 2 * (right - left) || right - left < 16;
  const room = (upright ? bottom - top : right - left) - 6;
  const text = choices.find((choice) => choice && ctx.measureText(choice).width <= room);
  if (!text) return;
  ctx.save();
  ctx.translate((left + right) / 2, (top + bottom) / 2);
  if (upright) ctx.rotate(-Math.PI / 2);
  ctx.fillText(text, 0, 0);
  ctx.restore();
}

function paintColumns(ctx, band, view, box, style) {
  const { x, y } = scales(view, box);
  const step = Math.max(1, Math.ceil((NARROW * (view.x1 - view.x0)) / box.w));
  columnsOf(band, style.colouring, step, style.wanted).forEach((column, c) => {
    const left = Math.round(x(c * step)), right = Math.round(x(Math.min(model.ranks, (c + 1) * step)));
    if (right <= box.x || left >= box.x + box.w) return;
    let row = band.top;
    for (const cell of column) {
      const top = Math.round(y(row)), bottom = Math.round(y(row + cell.numel));
      ctx.fillStyle = cell.dim ? "#ececec" : style.colouring.swatches[cell.swatch].colour;
      ctx.fillRect(left, top, right - left, bottom - top);
      row += cell.numel;
    }
  });
}

function paintBound(ctx, panel, view, box, text) {
  const at = Math.round(scales(view, box).y(panel.boundHeight)) + 0.5;
  if (at < box.y || at > box.y + box.h + 1) return;
  ctx.save();
  ctx.strokeStyle = INK;
  ctx.lineWidth = 1.5;
  ctx.setLineDash([5, 3]);
  ctx.beginPath();
  ctx.moveTo(box.x - 4, at);
  ctx.lineTo(box.x + box.w + 4, at);
  ctx.stroke();
  ctx.restore();
  if (text) write(ctx, text, box.x + box.w + 6, at, { size: 11 });
}

function outline(ctx, panel, view, box, param) {
  const { x, y } = scales(view, box);
  ctx.save();
  ctx.beginPath();
  ctx.rect(box.x - 2, box.y - 2, box.w + 4, box.h + 4);
  ctx.clip();
  for (const [width, colour] of [[4, "#fff"], [2, "#000"]]) {
    ctx.lineWidth = width;
    ctx.strokeStyle = colour;
    for (const run of runsOf(panel, param)) {
      const left = x(run.first), top = y(run.top);
      ctx.strokeRect(left, top, Math.max(2, x(run.last + 1) - left), Math.max(2, y(run.bottom) - top));
    }
  }
  ctx.restore();
}

function write(ctx, text, x, y, { size = 11.5, align = "left", base = "middle", colour = INK, weight = "normal" } = {}) {
  ctx.font = `${weight} ${size}px ${FONT}`;
  ctx.textAlign = align;
  ctx.textBaseline = base;
  ctx.fillStyle = colour;
  ctx.fillText(text, x, y);
}

function paintLoad(ctx, panel, view, box, { small, top }) {
  const perRank = box.w / (view.x1 - view.x0);
  const step = perRank < NARROW ? Math.ceil(NARROW / perRank) : 1;
  const height = (cost) => (cost / (1.05 * top)) * box.h;
  ctx.save();
  ctx.beginPath();
  ctx.rect(box.x, box.y, box.w, box.h + 1);
  ctx.clip();
  const { x } = scales(view, box);
  for (let rank = Math.floor(Math.max(0, view.x0) / step) * step; rank < Math.min(model.ranks, view.x1); rank += step) {
    const costs = panel.cost.slice(rank, rank + step);
    const left = Math.round(x(rank)), right = Math.round(x(Math.min(model.ranks, rank + step))) - (perRank >= 7 ? 1 : 0);
    const most = height(Math.max(...costs)), mean = height(costs.reduce((a, b) => a + b, 0) / costs.length);
    ctx.fillStyle = "#a9a9a9";
    ctx.fillRect(left, box.y + box.h - most, right - left, most);
    ctx.fillStyle = "#4d4d4d";
    ctx.fillRect(left, box.y + box.h - mean, right - left, mean);
  }
  ctx.restore();
  ctx.fillStyle = INK;
  ctx.fillRect(box.x, box.y + box.h, box.w, small ? 0.5 : 1);
  const at = Math.round(box.y + box.h - height(panel.makespanBound)) + 0.5;
  ctx.save();
  ctx.strokeStyle = INK;
  ctx.lineWidth = small ? 1 : 1.5;
  ctx.setLineDash([5, 3]);
  ctx.beginPath();
  ctx.moveTo(box.x - 4, at);
  ctx.lineTo(box.x + box.w + 4, at);
  ctx.stroke();
  ctx.restore();
  if (!small) write(ctx, "bound", box.x + box.w + 6, at, { size: 11 });
}

const LANES = { backward: 0, update: 0, forward: 0, reduce: 1, gather: 1 };
const LANE_COLOURS = { backward: "#0072B2", update: "#E69F00", forward: "#56B4E9", reduce: "#009E73", gather: "#CC79A7" };

function paintTimeline(ctx, step, width) {
  const box = { x: 150, y: 8, w: width - 170, h: 34 };
  const x = (s) => box.x + (s / step.step) * box.w;
  ctx.fillStyle = hatch(ctx);
  ctx.fillRect(box.x, box.y, box.w, box.h);
  ["compute (busiest rank)", "link"].forEach((lane, i) => write(ctx, lane, box.x - 10, box.y + 17 + i * 42, { align: "right" }));
  for (const [kind, bucket, start, stop] of step.events) {
    const top = box.y + LANES[kind] * 42;
    const left = x(start), right = x(stop);
    if (right - left < 0.2) continue;
    ctx.fillStyle = LANE_COLOURS[kind];
    ctx.fillRect(left, top, right - left, box.h);
    ctx.fillStyle = "#fff";
    ctx.fillRect(right - 0.5, top, 1, box.h);
    const text = [`${kind}${bucket === null || kind === "update" ? "" : ` ${bucket}`}`, bucket === null ? "" : String(bucket), ""]
      .find((t) => { ctx.font = `11px ${FONT}`; return ctx.measureText(t).width < right - left - 6; });
    if (text) write(ctx, text, (left + right) / 2, top + 17, { align: "center", size: 11, colour: ["backward"].includes(kind) ? "#fff" : "#000" });
  }
  const ticks = niceTicks(step.step, 8);
  for (const tick of ticks) {
    ctx.fillStyle = INK;
    ctx.fillRect(x(tick), box.y + 78, 1, 4);
    write(ctx, seconds(tick), x(tick), box.y + 90, { align: "center", size: 11, colour: SOFT });
  }
}

function niceTicks(most, count) {
  const rough = most / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((m) => m * power >= rough);
  return Array.from({ length: Math.floor(most / step) + 1 }, (_, i) => i * step);
}
