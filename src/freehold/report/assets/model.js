"use strict";
// The data of the page, and questions to it. Nothing here touches the document.

const model = JSON.parse(document.getElementById("data").textContent);

for (const panel of model.panels) {
  panel.height = 0;
  for (const band of panel.bands) {
    const whole = band.whole.length / 3;
    const count = whole + band.pieces.length / 5;
    // One typed array for each field: a layout may hold 45,000 blocks, and every frame walks through them.
    Object.assign(band, {
      count,
      param: new Int32Array(count), rank: new Int32Array(count), offset: new Float64Array(count),
      start: new Float64Array(count), stop: new Float64Array(count),
    });
    for (let i = 0; i < whole; i++) {
      const [param, rank, offset] = band.whole.slice(3 * i, 3 * i + 3);
      setBlock(band, i, param, rank, offset, 0, model.numels[param]);
    }
    for (let i = 0; i < count - whole; i++) setBlock(band, whole + i, ...band.pieces.slice(5 * i, 5 * i + 5));
    panel.height = Math.max(panel.height, band.top + band.shard);
  }
  panel.boundHeight = panel.bound / model.ranks;
  panel.maxCost = Math.max(...panel.cost);
  panel.sumCost = panel.cost.reduce((a, b) => a + b, 0);
}

const limits = {
  height: Math.max(...model.panels.map((panel) => panel.height)),
  cost: Math.max(1, ...model.panels.map((panel) => Math.max(panel.maxCost, panel.makespanBound))),
};

function setBlock(band, i, param, rank, offset, start, stop) {
  band.param[i] = param;
  band.rank[i] = rank;
  band.offset[i] = offset;
  band.start[i] = start;
  band.stop[i] = stop;
}

/** What ranks [first, first + step), [first + step, ...) hold in the mean: for each column [swatch, numel] in legend order. */
function columnsOf(band, colouring, step, wanted) {
  const columns = Array.from({ length: Math.ceil(model.ranks / step) }, () => new Map());
  for (let i = 0; i < band.count; i++) {
    const column = columns[Math.floor(band.rank[i] / step)];
    const key = 2 * colouring.of[band.param[i]] + (wanted(band.param[i]) ? 0 : 1);
    column.set(key, (column.get(key) || 0) + band.stop[i] - band.start[i]);
  }
  return columns.map((column, c) => {
    const ranks = Math.min(step, model.ranks - c * step);
    return [...column].sort((a, b) => a[0] - b[0])
      .map(([key, numel]) => ({ swatch: key >> 1, dim: (key & 1) === 1, numel: numel / ranks }));
  });
}

/** The block at a place of a panel, or the padding there. */
function blockAt(panel, rank, row) {
  const index = panel.bands.findIndex((band) => row >= band.top && row < band.top + band.shard);
  if (index < 0 || rank < 0 || rank >= model.ranks) return null;
  const band = panel.bands[index];
  const offset = row - band.top;
  let filled = 0;
  for (let i = 0; i < band.count; i++) {
    if (band.rank[i] !== rank) continue;
    const numel = band.stop[i] - band.start[i];
    if (offset >= band.offset[i] && offset < band.offset[i] + numel) return { band, index, rank, block: i };
    filled += numel;
  }
  return { band, index, rank, block: -1, filled };
}

/** All blocks of a param: [band, index of the block]. */
function blocksOf(panel, param) {
  const found = [];
  for (const band of panel.bands) {
    for (let i = 0; i < band.count; i++) if (band.param[i] === param) found.push([band, i]);
  }
  return found;
}

/** The same, but neighbouring ranks that hold equally much of it, as a stack has them, are one rectangle. */
function runsOf(panel, param) {
  const runs = [];
  for (const [band, i] of blocksOf(panel, param).sort((a, b) => a[0].rank[a[1]] - b[0].rank[b[1]])) {
    const rank = band.rank[i], top = band.top + band.offset[i], bottom = top + band.stop[i] - band.start[i];
    const run = runs.at(-1);
    if (run && run.last === rank - 1 && run.top === top && run.bottom === bottom) run.last = rank;
    else runs.push({ first: rank, last: rank, top, bottom });
  }
  return runs;
}

function si(value, digits = 3) {
  if (!Number.isFinite(value)) return "none";
  for (const [unit, size] of [["P", 1e15], ["T", 1e12], ["G", 1e9], ["M", 1e6], ["k", 1e3]]) {
    if (value >= size) return `${(value / size).toPrecision(digits)} ${unit}`;
  }
  return String(Math.round(value * 100) / 100);
}

function bytes(value) {
  return value >= 1e12 ? `${(value / 1e12).toPrecision(3)} TB` : `${(value / 1e9).toPrecision(3)} GB`;
}

const percent = (value) => `${(100 * value).toFixed(value !== 0 && value < 0.001 ? 3 : value < 0.0995 ? 2 : 1)} %`;
const seconds = (value) => (value >= 1 ? `${value.toFixed(2)} s` : `${(1000 * value).toPrecision(3)} ms`);
const grouped = (value) => value.toLocaleString("en-US");
