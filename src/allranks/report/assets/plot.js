"use strict";
// How is a plot drawn? Every mark is an SVG element made here, from numbers in the page, at the width the plot has now.
// Text goes in by textContent only: nothing that a run logged is ever read as HTML.

const SVG = "http://www.w3.org/2000/svg";

/** An SVG element with attributes; children are elements or strings. */
function svg(name, attributes = {}, ...children) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  for (const child of children) made.append(child);
  return made;
}

/** An HTML element, likewise. */
function html(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  for (const child of children) made.append(child);
  return made;
}

/** Numbers between low and high at which an axis has its ticks: 1, 2 or 5 times a power of ten apart. */
function ticks(low, high, wanted) {
  if (!(high > low)) return [low];
  const raw = (high - low) / Math.max(1, wanted);
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((k) => k * power).find((s) => s >= raw);
  const out = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high + step * 1e-9; k++) out.push(Number((k * step).toPrecision(12)));
  return out;
}

/** Ticks of a clock: whole seconds, minutes or hours apart. */
function clockTicks(low, high, wanted) {
  const steps = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400];
  const step = steps.find((s) => s >= (high - low) / Math.max(1, wanted)) ?? 86400 * Math.ceil((high - low) / 86400 / wanted);
  const out = [];
  for (let at = Math.ceil(low / step) * step; at <= high; at += step) out.push(at);
  return out;
}

/** Powers of ten, with 2 and 5 where there are few. */
function logTicks(low, high) {
  const out = [];
  const first = Math.floor(Math.log10(low)), last = Math.ceil(Math.log10(high));
  const factors = last - first > 3 ? [1] : [1, 2, 5];
  for (let e = first; e <= last; e++) for (const f of factors) {
    const value = f * 10 ** e;
    if (value >= low * 0.999 && value <= high * 1.001) out.push(value);
  }
  return out;
}

/** A number for people: 1,234, 0.0123, 1.2e-7. */
function number(value, digits = 4) {
  if (value === null || value === undefined) return "-";
  if (!Number.isFinite(value)) return String(value);
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-4 || size >= 1e7)) return value.toExponential(2).replace("e+", "e");
  if (size >= 1000) return Math.round(value).toLocaleString("en-US");
  return String(Number(value.toPrecision(digits)));
}

/** A span of time for people, given milliseconds. */
function span(ms) {
  const size = Math.abs(ms);
  if (size === 0) return "0";
  if (size < 1) return `${number(ms * 1000, 3)} us`;
  if (size < 1000) return `${number(ms, 3)} ms`;
  if (size < 120e3) return `${number(ms / 1000, 3)} s`;
  if (size < 7200e3) return `${number(ms / 60e3, 3)} min`;
  return `${number(ms / 3600e3, 3)} h`;
}

/** A clock of the run, given seconds since its start: 0:05, 12:30, 3:04:05. */
function clock(seconds) {
  const whole = Math.round(seconds), h = Math.floor(whole / 3600), m = Math.floor(whole / 60) % 60, s = whole % 60;
  const two = (n) => String(n).padStart(2, "0");
  return h ? `${h}:${two(m)}:${two(s)}` : `${m}:${two(s)}`;
}

/** The name of a number as it was formatted in the data: "ms", "s", "clock", "step", "". */
function formatted(value, unit) {
  if (unit === "ms") return span(value);
  if (unit === "clock") return clock(value);
  if (unit === "step") return Number.isInteger(value) ? value.toLocaleString("en-US") : "";
  if (unit === "%") return `${number(value, 3)} %`;
  return number(value) + (unit ? ` ${unit}` : "");
}

/** The lightness of a heat map's cell, 0 to 1, as one of 12 classes: a scale that stays one without colours. */
const heatClass = (share) => `h${Math.max(0, Math.min(11, Math.floor(share * 12)))}`;

/** A frame with axes. Gives the scales; `plot.x(value)` is a position. */
function frame(width, height, {xRange, yRange, xUnit, yUnit, yLog = false, left = 58, label}) {
  const box = {left, right: width - 14, top: 12, bottom: height - 26};
  const root = svg("svg", {width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label});
  const x = (v) => box.left + ((v - xRange[0]) / (xRange[1] - xRange[0] || 1)) * (box.right - box.left);
  const to = yLog ? Math.log10 : (v) => v;
  const y = (v) => box.bottom - ((to(v) - to(yRange[0])) / (to(yRange[1]) - to(yRange[0]) || 1)) * (box.bottom - box.top);
  const axis = svg("g", {class: "axis", "aria-hidden": "true"});
  // Ranks below each other have names instead of a scale.
  const ys = yUnit === null ? [] : yLog ? logTicks(...yRange) : ticks(yRange[0], yRange[1], Math.max(2, Math.round((box.bottom - box.top) / 42)));
  for (const value of ys) {
    axis.append(svg("line", {x1: box.left, x2: box.right, y1: y(value), y2: y(value)}));
    axis.append(svg("text", {x: box.left - 8, y: y(value) + 4, "text-anchor": "end"}, yUnit === "ms" ? span(value) : number(value)));
  }
  const xs = (xUnit === "clock" ? clockTicks : ticks)(xRange[0], xRange[1], Math.max(2, Math.floor((box.right - box.left) / 90)));
  for (const value of xs) {
    const text = formatted(value, xUnit);
    const isLast = x(value) > width - 4 - 3.5 * text.length;
    if (text) axis.append(svg("text", {x: isLast ? width - 2 : x(value), y: height - 8, "text-anchor": isLast ? "end" : "middle"}, text));
  }
  root.append(axis);
  return {root, x, y, box};
}

/** [low, high] around all finite values, with a little room; from zero where that costs little. */
function rangeOf(values, {zero = false, log = false} = {}) {
  let low = Infinity, high = -Infinity;
  for (const v of values) if (Number.isFinite(v) && (!log || v > 0)) { low = Math.min(low, v); high = Math.max(high, v); }
  if (low > high) return [0, 1];
  if (log) return low === high ? [low / 2, high * 2] : [low, high];
  if (zero) low = Math.min(0, low);
  if (low === high) return [low - (Math.abs(low) || 1) * 0.1, high + (Math.abs(high) || 1) * 0.1];
  const room = (high - low) * 0.04;
  return [zero && low === 0 ? 0 : low - room, high + room];
}

/** Call `draw(width)` now and whenever the width of the box changes. */
function redrawn(box, draw) {
  let last = 0;
  new ResizeObserver(() => {
    const width = Math.floor(box.clientWidth);
    if (width > 0 && width !== last) { last = width; draw(width); }
  }).observe(box);
}
