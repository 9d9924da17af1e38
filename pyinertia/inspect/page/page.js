// Shows a recording: the page has its data as JSON, see data() in pyinertia/inspect/page.py.
"use strict";

const at = (id) => document.getElementById(id);
const data = JSON.parse(at("data").textContent);
const scores = Uint8Array.from(atob(data.scores), (c) => c.charCodeAt(0));
const lastStep = data.n_tokens.length - 1;
const nTokens = data.n_tokens[lastStep];
const N_LEVELS = 8;
// said of the first steps only; some policies never score
const UNSCORED = data.scored.includes(true) ? " No token has a score yet." : "";

// one byte per resident cell and step, steps after each other
const offsets = [0];
for (const n of data.n_cells) offsets.push(offsets[offsets.length - 1] + n);

const number = (n) => n.toLocaleString("en");
const isKept = (pos, step) =>
  pos < data.n_tokens[step] && (data.lost[pos] < 0 || data.lost[pos] > step);

// as Scale.levels in pyinertia/inspect/scale.py
const level = (byte) =>
  Math.min(N_LEVELS - 1, Math.floor((byte * N_LEVELS) / (data.scale.top + 1)));

function scoreText(byte) {
  const { low, high, log } = data.scale;
  const rounded = (value) => String(Number(value.toPrecision(2)));
  if (byte < 2) return `at most ${rounded(low)}`;
  const share = (byte - 1) / 254;
  return "about " + rounded(log ? low * (high / low) ** share : low + (high - low) * share);
}

// text

const pieces = [];
const specials = new Set(data.special);
let start = 0;
data.texts.forEach((text, i) => {
  const span = document.createElement("span");
  const n = data.counts[i] ?? 1;
  const fixed =
    (specials.has(i) ? " special" : "") + (/^[ \t]*\n\s*$/.test(text) ? " newline" : "");
  span.textContent = text;
  span.dataset.i = i;
  pieces.push({ span, text, start, n, fixed, shown: "" });
  start += n;
});
for (const [id, isHere] of [
  ["prompt", (p) => p.start < data.n_prompt],
  ["answer", (p) => p.start >= data.n_prompt],
]) {
  const all = document.createDocumentFragment();
  for (const piece of pieces) if (isHere(piece)) all.append(piece.span);
  at(id).append(all);
}

let step = lastStep;
let bytes = new Uint8Array(nTokens); // by position, of the step that is shown
let current = -1; // the piece that the readout is about

function show(next) {
  step = next;
  bytes = new Uint8Array(nTokens);
  let cell = offsets[step];
  for (let pos = 0; pos < data.n_tokens[step]; pos++)
    if (isKept(pos, step)) bytes[pos] = scores[cell++];
  for (const piece of pieces) {
    const { kept, read, byte } = fate(piece);
    let shown = "k" + level(byte);
    if (!read) shown = "f";
    else if (!kept) shown = "x";
    else if (kept < read) shown += " part";
    if (shown === piece.shown) continue;
    piece.shown = shown;
    piece.span.className = shown + piece.fixed;
  }
  if (current >= 0) point(current);
  at("number").value = `${number(data.n_decoded[step])} of ${number(data.n_decoded[lastStep])}`;
  at("step").setAttribute("aria-valuetext", at("number").value);
  at("state").textContent = data.states[step] + (data.scored[step] ? "" : UNSCORED);
  for (const line of document.querySelectorAll(".now")) {
    line.setAttribute("x1", x(data.n_decoded[step]));
    line.setAttribute("x2", x(data.n_decoded[step]));
  }
  drawShares();
}

// how many of a piece's tokens were read, how many are kept, the highest score of those, and the
// step that had lost the last of the others
function fate(piece) {
  const read = Math.min(Math.max(data.n_tokens[step] - piece.start, 0), piece.n);
  let kept = 0;
  let byte = 0;
  let lost = -1;
  for (let pos = piece.start; pos < piece.start + read; pos++) {
    if (isKept(pos, step)) {
      kept++;
      byte = Math.max(byte, bytes[pos]);
    } else lost = Math.max(lost, data.lost[pos]);
  }
  return { read, kept, byte, lost };
}

function point(i) {
  if (current >= 0) pieces[current].span.classList.remove("at");
  current = i;
  const piece = pieces[i];
  const { read, kept, byte, lost } = fate(piece);
  const end = piece.start + piece.n - 1;
  let what = `Position ${number(piece.start)}${piece.n > 1 ? ` to ${number(end)}` : ""}, `;
  what += `${JSON.stringify(piece.text)}: `;
  if (!read) what += "not there yet.";
  else if (!kept && !lost) what += "dropped while the prompt was read.";
  else if (!kept) what += `dropped by decode step ${number(data.n_decoded[lost])}.`;
  else {
    what += kept < read ? `${kept} of ${read} tokens in the cache` : "in the cache";
    const scored = data.scored[step];
    what += scored ? `, score ${scoreText(byte)}.` : `.${UNSCORED}`;
  }
  piece.span.classList.add("at");
  at("readout").hidden = false;
  at("readout").textContent = what;
}

// charts

const LEFT = 44;
const RIGHT = 330;
const TOP = 12;
const BOTTOM = 126;
const nDecoded = data.n_decoded[lastStep];
const x = (n) => LEFT + (nDecoded ? n / nDecoded : 0) * (RIGHT - LEFT);

function draw(svg, name, attributes, text = "") {
  const node = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.textContent = text;
  svg.append(node);
}

function frame(svg, top, left, right) {
  draw(svg, "line", { class: "axis", x1: LEFT, x2: RIGHT, y1: BOTTOM, y2: BOTTOM });
  draw(svg, "line", { class: "axis", x1: LEFT, x2: RIGHT, y1: TOP, y2: TOP });
  draw(svg, "text", { x: LEFT - 6, y: TOP + 4, "text-anchor": "end" }, top);
  draw(svg, "text", { x: LEFT - 6, y: BOTTOM + 4, "text-anchor": "end" }, "0");
  draw(svg, "text", { x: LEFT, y: BOTTOM + 16 }, left);
  draw(svg, "text", { x: RIGHT, y: BOTTOM + 16, "text-anchor": "end" }, right);
}

function curve(svg, name, values, most) {
  const points = values
    .map((value, i) => [x(data.n_decoded[i]), value])
    .filter(([, value]) => value !== null)
    .map(([px, value]) => `${px.toFixed(1)},${height(value / most).toFixed(1)}`);
  draw(svg, "polyline", { class: name, points: points.join(" ") });
}

const height = (share) => BOTTOM - share * (BOTTOM - TOP);
// a round number that is no less
function ceiling(value) {
  const unit = 10 ** Math.floor(Math.log10(Math.max(value, 1e-9)));
  return unit * [1, 1.5, 2, 3, 4, 5, 6, 8, 10].find((n) => n * unit >= value * 0.999);
}

function drawSteps() {
  const cells = at("cells");
  const most = ceiling(nTokens);
  frame(cells, number(most), "0", number(nDecoded));
  const isCut = data.n_cells[lastStep] < nTokens;
  if (isCut) {
    curve(cells, "rival", data.n_tokens, most);
    draw(
      cells, "text",
      { class: "rival", x: RIGHT, y: height(nTokens / most) + 14, "text-anchor": "end" },
      "all tokens: a full cache",
    );
  }
  curve(cells, "curve", data.n_cells, most);
  const labelAt = height(data.n_cells[lastStep] / most) - 6;
  if (isCut)
    draw(cells, "text", { class: "named", x: RIGHT, y: labelAt, "text-anchor": "end" }, "cells");
  cells.setAttribute(
    "aria-label",
    `${number(data.n_cells[0])} cells after the prompt, ${number(data.n_cells[lastStep])} at the ` +
      `end, of ${number(nTokens)} tokens`,
  );
  const speed = at("speed");
  const speeds = data.speed.filter((value) => value !== null);
  if (speeds.length) {
    const fastest = ceiling(Math.max(...speeds));
    frame(speed, number(fastest), "0", number(nDecoded));
    curve(speed, "curve", data.speed, fastest);
    const [first, last] = [speeds[0], speeds[speeds.length - 1]].map((v) => number(Math.round(v)));
    speed.setAttribute("aria-label", `${first} tokens per second at first, ${last} at the end`);
  } else draw(speed, "text", { x: LEFT, y: 70 }, "nothing was decoded");
  for (const svg of [cells, speed])
    draw(svg, "line", { class: "now", x1: LEFT, x2: LEFT, y1: TOP, y2: BOTTOM });
}

function drawShares() {
  const svg = at("shares");
  svg.replaceChildren();
  frame(svg, "100%", "0", number(nTokens));
  const nBins = Math.min(72, nTokens);
  const px = (pos) => LEFT + (pos / nTokens) * (RIGHT - LEFT);
  const summary = [0, 0, 0];
  for (let bin = 0; bin < nBins; bin++) {
    const from = Math.round((bin * nTokens) / nBins);
    const to = Math.min(Math.round(((bin + 1) * nTokens) / nBins), data.n_tokens[step]);
    let kept = 0;
    for (let pos = from; pos < to; pos++) {
      kept += isKept(pos, step);
      summary[Math.floor((3 * pos) / nTokens)] += isKept(pos, step);
    }
    if (!kept) continue;
    const top = height(kept / (to - from));
    draw(svg, "rect", {
      class: "bin", x: px(from).toFixed(1), y: top.toFixed(1),
      width: Math.max(px(to) - px(from) - 0.4, 0.5).toFixed(1), height: (BOTTOM - top).toFixed(1),
    });
  }
  if (nDecoded)
    draw(svg, "line", {
      class: "border", x1: px(data.n_prompt), x2: px(data.n_prompt), y1: TOP, y2: BOTTOM,
    });
  const [a, b, c] = summary.map(number);
  svg.setAttribute("aria-label", `${a} cells in the first third of the text, ${b} in the second, ` +
    `${c} in the last`);
}

// what the user does

at("step").addEventListener("input", (event) => show(Number(event.target.value)));
at("hide").addEventListener("change", (event) =>
  at("text").classList.toggle("only", event.target.checked));
at("text").addEventListener("pointerover", (event) => {
  if (event.target.dataset.i) point(Number(event.target.dataset.i));
});
at("text").addEventListener("keydown", (event) => {
  const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (!by || event.altKey || event.ctrlKey || event.metaKey) return;
  event.preventDefault();
  point(Math.min(Math.max(current + by, 0), pieces.length - 1));
  pieces[current].span.scrollIntoView({ block: "nearest" });
});

drawSteps();
at("step").value = lastStep;
at("step").disabled = !lastStep;
show(lastStep);
