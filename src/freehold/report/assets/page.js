// The document: cards, legend, the large map, and what the mouse and the keyboard do to them.

const MARGIN = { left: 168, right: 62, top: 6, axis: 30 };
const LOAD_HEIGHT = 110;
const $ = (id) => document.getElementById(id);

const state = { panel: model.panels.length - 1, colouring: 0, focus: -1, find: "", hover: -1, view: null };
const shown = () => model.panels[state.panel];
const home = () => ({ x0: 0, x1: model.ranks, y0: 0, y1: shown().height });
const mapHeight = () => Math.min(900, Math.max(440, 15 * shown().bands.length)); // room for a label at each bucket
state.view = home();

function element(tag, text = "", attributes = {}) {
  const made = document.createElement(tag);
  made.textContent = text;
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

function wanted(param) {
  const colouring = model.colourings[state.colouring];
  if (state.focus >= 0 && colouring.of[param] !== state.focus) return false;
  return !state.find || model.names[param].toLowerCase().includes(state.find);
}

const style = (small) => ({ colouring: model.colourings[state.colouring], wanted, small });

// -- cards ------------------------------------------------------------------------------------------------------------

function best(of) {
  const values = model.panels.map(of);
  const least = Math.min(...values);
  return (panel) => model.panels.length > 1 && of(panel) <= least * (1 + 1e-9);
}

function figures(panel) {
  const rows = [
    ["padding", percent((panel.numel - panel.real) / panel.real), `bound ${percent((panel.bound - panel.real) / panel.real)}`, (p) => p.numel],
    ["busiest rank", `${(panel.maxCost / Math.max(1, panel.makespanBound)).toFixed(3)}`, "× bound", (p) => p.maxCost],
    ["memory", bytes(panel.bytes), "on each rank", (p) => p.bytes],
    ["buckets", String(panel.bands.length), `largest ${si(Math.max(...panel.bands.map((b) => b.shard * model.ranks)))}`, null],
  ];
  if (panel.step) rows.push(["step", seconds(panel.step.step), `${seconds(panel.step.exposed)} exposed`, (p) => p.step.step]);
  const grid = element("div", "", { class: "figures" });
  for (const [label, value, against, of] of rows) {
    grid.append(element("span", label, { class: "label" }));
    grid.append(element("span", value, { class: of && best(of)(panel) ? "value best" : "value" }));
    grid.append(element("span", against, { class: "against" }));
  }
  return grid;
}

function buildCards() {
  model.panels.forEach((panel, i) => {
    const card = element("button", "", { class: "card", type: "button", role: "radio", id: `card-${i}` });
    card.append(element("span", "shown below", { class: "shown" }), element("span", panel.policy, { class: "name" }));
    card.append(figures(panel), element("canvas"), element("canvas"));
    card.addEventListener("click", () => choose(i));
    $("cards").append(card);
  });
}

function choose(i) {
  state.panel = i;
  state.view = home();
  render();
}

function paintCard(panel, i) {
  const [map, load] = $(`card-${i}`).querySelectorAll("canvas");
  const box = { x: 4, y: 4, w: map.clientWidth - 8, h: 172 };
  const ctx = prepare(map, 182);
  const view = { x0: 0, x1: model.ranks, y0: 0, y1: limits.height };
  paintMap(ctx, panel, view, box, style(true));
  paintBound(ctx, panel, view, box, "");
  keep(map, ctx, { panel, view, box });
  paintLoad(prepare(load, 42), panel, view, { x: 4, y: 2, w: load.clientWidth - 8, h: 38 }, { small: true, top: limits.cost });
}

// -- outlines: maps are kept as they were painted, because walking through 45,000 blocks at each move of the mouse is slow

const kept = new Map();

function keep(canvas, ctx, what) {
  const copy = document.createElement("canvas");
  copy.width = canvas.width;
  copy.height = canvas.height;
  copy.getContext("2d").drawImage(canvas, 0, 0);
  kept.set(canvas, { ctx, copy, ...what });
  paintOutline(canvas);
}

function paintOutline(canvas) {
  const { ctx, copy, panel, view, box } = kept.get(canvas);
  ctx.save();
  ctx.setTransform(1, 0, 0, 1, 0, 0);
  ctx.clearRect(0, 0, copy.width, copy.height);
  ctx.drawImage(copy, 0, 0);
  ctx.restore();
  if (state.hover >= 0) outline(ctx, panel, view, box, state.hover);
}

const paintOutlines = () => [...kept.keys()].forEach(paintOutline);

// -- legend -----------------------------------------------------------------------------------------------------------

function buildLegend() {
  const colouring = model.colourings[state.colouring];
  const legend = $("legend");
  legend.replaceChildren();
  const named = colouring.swatches.map((swatch, i) => [swatch, i]).filter(([swatch]) => !colouring.graded || !swatch.code);
  if (colouring.graded) legend.append(...scale(colouring.swatches.filter((swatch) => swatch.code)));
  for (const [swatch, i] of named) {
    const entry = element("button", "", { type: "button", "aria-pressed": String(state.focus === i) });
    const chip = element("span", colouring.name === "role" ? swatch.code : "", { class: "chip" });
    chip.style.background = swatch.colour;
    chip.style.color = swatch.ink;
    entry.append(chip, element("span", swatch.label));
    entry.addEventListener("click", () => {
      state.focus = state.focus === i ? -1 : i;
      render();
    });
    legend.append(entry);
  }
  legend.append(element("span", "", { class: "chip padding" }), element("span", "padding"));
  legend.append(element("span", "╌╌ bound: no layout ends above it"));
}

function scale(swatches) {
  if (!swatches.length) return [];
  const chip = element("span", "", { class: "chip scale" });
  chip.style.background = `linear-gradient(90deg, ${swatches.map((swatch) => swatch.colour).join(",")})`;
  return [element("span", swatches[0].label), chip, element("span", swatches[swatches.length - 1].label)];
}

// -- the large map ----------------------------------------------------------------------------------------------------

function mapBox() {
  return { x: MARGIN.left, y: MARGIN.top, w: $("map").clientWidth - MARGIN.left - MARGIN.right, h: mapHeight() };
}

function paintDetail() {
  const panel = shown();
  const box = mapBox();
  const ctx = prepare($("map"), box.h + MARGIN.top + MARGIN.axis);
  paintMap(ctx, panel, state.view, box, style(false));
  paintBound(ctx, panel, state.view, box, "bound");
  paintBandLabels(ctx, panel, box);
  paintRankAxis(ctx, box);
  keep($("map"), ctx, { panel, view: state.view, box });
  const load = prepare($("load"), LOAD_HEIGHT + 8);
  const loadBox = { x: box.x, y: 4, w: box.w, h: LOAD_HEIGHT };
  paintLoad(load, panel, state.view, loadBox, { small: false, top: Math.max(1, panel.maxCost, panel.makespanBound) });
  write(load, "Newton-Schulz load", box.x - 10, 16, { align: "right", weight: "600" });
  write(load, `busiest ${(panel.maxCost / Math.max(1, panel.makespanBound)).toFixed(3)} × bound`, box.x - 10, 34, { align: "right", size: 11, colour: SOFT });
  write(load, `idle ${percent(1 - panel.sumCost / Math.max(1, panel.maxCost * model.ranks))} of the update`, box.x - 10, 50, { align: "right", size: 11, colour: SOFT });
}

function paintBandLabels(ctx, panel, box) {
  const { y } = scales(state.view, box);
  let free = -Infinity;
  panel.bands.forEach((band, i) => {
    const top = Math.max(box.y, y(band.top)), bottom = Math.min(box.y + box.h, y(band.top + band.shard));
    const middle = (top + bottom) / 2;
    if (bottom < box.y || top > box.y + box.h || middle - 7 < free) return;
    const padding = percent(1 - band.real / (band.shard * model.ranks));
    const two = bottom - top >= 44;
    write(ctx, `bucket ${i} · ${band.mode}`, box.x - 10, two ? middle - 8 : middle, { align: "right", weight: "600" });
    if (two) write(ctx, `${si(band.shard * model.ranks)} · ${padding} padding`, box.x - 10, middle + 8, { align: "right", size: 11, colour: SOFT });
    free = middle + (two ? 16 : 7);
  });
}

function paintRankAxis(ctx, box) {
  const { x } = scales(state.view, box);
  const step = Math.max(1, [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024].find((s) => (box.w / (state.view.x1 - state.view.x0)) * s >= 30) || 2048);
  for (let rank = Math.ceil(state.view.x0 / step) * step; rank < Math.min(model.ranks, state.view.x1); rank += step) {
    if (rank < 0) continue;
    const middle = x(rank + 0.5);
    if (middle > box.x + box.w) break;
    write(ctx, String(rank), middle, box.y + box.h + 12, { align: "center", size: 11, colour: SOFT });
  }
  write(ctx, "rank", box.x - 10, box.y + box.h + 12, { align: "right", size: 11, colour: SOFT });
}

// -- pointing ---------------------------------------------------------------------------------------------------------

function place(event) {
  const rect = $("map").getBoundingClientRect();
  const box = mapBox(), view = state.view;
  const fx = (event.clientX - rect.left - box.x) / box.w, fy = (event.clientY - rect.top - box.y) / box.h;
  return { fx, fy, rank: view.x0 + fx * (view.x1 - view.x0), row: view.y0 + fy * (view.y1 - view.y0) };
}

function tipRows(hit, panel) {
  const { band, index, rank, block } = hit;
  const bucket = `${index} (${band.mode}, ${band.dtype})`;
  if (block < 0) {
    const empty = band.shard - hit.filled;
    return ["padding", [["rank", rank], ["bucket", bucket], ["padding here", `${grouped(empty)} elements, ${percent(empty / band.shard)} of the shard`]]];
  }
  const param = band.param[block], granule = model.granules[param];
  const numel = band.stop[block] - band.start[block], all = model.numels[param];
  const ranks = blocksOf(panel, param).map(([b, i]) => b.rank[i]);
  const first = Math.min(...ranks), last = Math.max(...ranks);
  const rows = [["shape", model.shapes[param]]];
  if (granule > 1 && all > granule) {
    rows.push(["matrices", `${band.start[block] / granule} to ${band.stop[block] / granule - 1} of ${all / granule}`]);
  }
  rows.push(["owner", first === last ? `rank ${rank}` : `rank ${rank} (of ${first} to ${last})`]);
  rows.push(["bucket", bucket], ["offset", `${grouped(band.offset[block])} in the shard`]);
  rows.push(["elements", numel === all ? grouped(numel) : `${grouped(numel)} of ${grouped(all)}`]);
  if (granule > 1) {
    const cost = (numel / granule) * model.costs[model.costOf[param]];
    rows.push(["cost", `${si(cost)}, ${percent(cost / Math.max(1, panel.cost[rank]))} of this rank's load`]);
  } else rows.push(["cost", "elementwise, no Newton-Schulz"]);
  return [model.names[param], rows];
}

function point(event) {
  const panel = shown();
  const { fx, fy, rank, row } = place(event);
  const hit = fx < 0 || fx >= 1 || fy < 0 || fy >= 1 ? null : blockAt(panel, Math.floor(rank), row);
  const hover = hit && hit.block >= 0 ? hit.band.param[hit.block] : -1;
  if (hover !== state.hover) {
    state.hover = hover;
    paintOutlines();
  }
  if (hit) showTip(event, ...tipRows(hit, panel));
  else $("tip").hidden = true;
}

function showTip(event, head, rows) {
  const tip = $("tip"), table = element("table");
  for (const [label, value] of rows) {
    const line = element("tr");
    line.append(element("td", label), element("td", String(value)));
    table.append(line);
  }
  tip.replaceChildren(element("b", head), table);
  tip.hidden = false;
  const right = event.clientX + 18 + tip.offsetWidth > window.innerWidth;
  const below = event.clientY + 18 + tip.offsetHeight > window.innerHeight;
  tip.style.left = `${right ? event.clientX - tip.offsetWidth - 12 : event.clientX + 18}px`;
  tip.style.top = `${Math.max(4, below ? event.clientY - tip.offsetHeight - 12 : event.clientY + 18)}px`;
}

function pointLoad(event) {
  const panel = shown(), box = mapBox(), view = state.view;
  const fx = (event.clientX - $("load").getBoundingClientRect().left - box.x) / box.w;
  const rank = Math.floor(view.x0 + fx * (view.x1 - view.x0));
  if (fx < 0 || fx >= 1 || rank < 0 || rank >= model.ranks) return void ($("tip").hidden = true);
  const cost = panel.cost[rank];
  showTip(event, `rank ${rank}`, [
    ["load", si(cost)],
    ["of the bound", percent(cost / Math.max(1, panel.makespanBound))],
    ["of the busiest", percent(cost / Math.max(1, panel.maxCost))],
  ]);
}

// -- moving -----------------------------------------------------------------------------------------------------------

function clamp(low, high, least, most) {
  const span = Math.min(high - low, most);
  const start = Math.min(Math.max(0, low), most - span);
  return span < least ? [start, start + least] : [start, start + span];
}

function setView(x0, x1, y0, y1) {
  [x0, x1] = clamp(x0, x1, Math.min(2, model.ranks), model.ranks);
  [y0, y1] = clamp(y0, y1, Math.min(1024, shown().height), shown().height);
  state.view = { x0, x1, y0, y1 };
  paintDetail();
}

function zoom(factor, fx = 0.5, fy = 0.5) {
  const v = state.view, w = (v.x1 - v.x0) * factor, h = (v.y1 - v.y0) * factor;
  const cx = v.x0 + fx * (v.x1 - v.x0), cy = v.y0 + fy * (v.y1 - v.y0);
  setView(cx - fx * w, cx - fx * w + w, cy - fy * h, cy - fy * h + h);
}

function move(dx, dy) {
  const v = state.view, w = v.x1 - v.x0, h = v.y1 - v.y0;
  setView(v.x0 + dx * w, v.x1 + dx * w, v.y0 + dy * h, v.y1 + dy * h);
}

const isWhole = () => state.view.x1 - state.view.x0 >= model.ranks && state.view.y1 - state.view.y0 >= shown().height;

function listen() {
  const map = $("map");
  let held = null;
  map.addEventListener("pointermove", (event) => {
    if (!held) return point(event);
    const box = mapBox();
    move((held.x - event.clientX) / box.w, (held.y - event.clientY) / box.h);
    held = { x: event.clientX, y: event.clientY };
  });
  map.addEventListener("pointerdown", (event) => { held = { x: event.clientX, y: event.clientY }; map.setPointerCapture(event.pointerId); $("tip").hidden = true; });
  map.addEventListener("pointerup", () => { held = null; });
  map.addEventListener("pointerleave", () => { $("tip").hidden = true; state.hover = -1; paintOutlines(); });
  map.addEventListener("wheel", (event) => {
    if (event.deltaY > 0 && isWhole()) return; // nothing left to show: let the page scroll
    event.preventDefault();
    const { fx, fy } = place(event);
    zoom(Math.exp(Math.sign(event.deltaY) * 0.25), Math.min(1, Math.max(0, fx)), Math.min(1, Math.max(0, fy)));
  }, { passive: false });
  map.addEventListener("dblclick", (event) => {
    const hit = blockAt(shown(), Math.floor(place(event).rank), place(event).row);
    if (hit) setView(0, model.ranks, hit.band.top, hit.band.top + hit.band.shard);
  });
  map.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: [-0.2, 0], ArrowRight: [0.2, 0], ArrowUp: [0, -0.2], ArrowDown: [0, 0.2] }[event.key];
    if (step) move(...step);
    else if (event.key === "+" || event.key === "=") zoom(0.6);
    else if (event.key === "-") zoom(1 / 0.6);
    else if (event.key === "0" || event.key === "Home") setView(...Object.values(home()));
    else return;
    event.preventDefault();
  });
  $("load").addEventListener("pointermove", pointLoad);
  $("load").addEventListener("pointerleave", () => { $("tip").hidden = true; });
  $("zoom-in").addEventListener("click", () => zoom(0.6));
  $("zoom-out").addEventListener("click", () => zoom(1 / 0.6));
  $("reset").addEventListener("click", () => setView(...Object.values(home())));
  $("find").addEventListener("input", (event) => { state.find = event.target.value.trim().toLowerCase(); render(); });
  $("colouring").addEventListener("change", (event) => { state.colouring = Number(event.target.value); state.focus = -1; render(); });
  window.addEventListener("resize", paintAll);
}

// -- all of it --------------------------------------------------------------------------------------------------------

function paintAll() {
  model.panels.forEach(paintCard);
  paintDetail();
  const step = shown().step;
  if (step) paintTimeline(prepare($("timeline"), 112), step, $("timeline").clientWidth);
}

function render() {
  const panel = shown();
  model.panels.forEach((_, i) => $(`card-${i}`).setAttribute("aria-checked", String(i === state.panel)));
  $("detail-title").textContent = `${panel.policy}: ${panel.bands.length} buckets down, ${model.ranks} ranks across`;
  $("found").textContent = state.find ? `${model.names.filter((_, param) => wanted(param)).length} params` : "";
  $("advice").hidden = !panel.advice.length;
  $("advice-list").replaceChildren(...panel.advice.map((text) => element("li", text)));
  $("step").hidden = !panel.step;
  if (panel.step) {
    $("step-title").textContent = `One step, simulated: ${seconds(panel.step.step)}, of which ${seconds(panel.step.exposed)} only wait for the link (hatched)`;
  }
  buildLegend();
  paintAll();
}

model.colourings.forEach((colouring, i) => $("colouring").append(element("option", colouring.name, { value: i })));
$("summary").textContent = `${grouped(model.ranks)} ranks · ${grouped(model.names.length)} params · ${si(model.panels[0].real)} elements`;
$("cards").style.setProperty("--cards", model.panels.length);
buildCards();
listen();
render();
window.freehold = { model, state, limits, blockAt, blocksOf, columnsOf, scales, mapBox };
document.documentElement.dataset.ready = "true";
