"use strict";
// Curves over steps or time, with a cursor that follows the pointer or the arrow keys.

/** One plot of curves. `data`: {label, xUnit, xName, yUnit, zero, series: [{name, points: [[x, y], ...]}], marks: [{x, label, kind}]}. */
function linePlot(figure, data) {
  const box = figure.querySelector(".plot"), says = figure.querySelector(".says");
  const button = figure.querySelector("button.log");
  let isLog = false, cursor = -1;
  const xs = [...new Set(data.series.flatMap((s) => s.points.map((p) => p[0])))].sort((a, b) => a - b);
  const looked = data.series.map((s) => new Map(s.points.map((p) => [p[0], p[1]])));

  function draw(width) {
    const height = width < 520 ? 200 : 240;
    const values = data.series.flatMap((s) => s.points.map((p) => p[1]));
    const yRange = rangeOf(values, {zero: data.zero, log: isLog});
    const xRange = xs.length > 1 ? [xs[0], xs[xs.length - 1]] : [(xs[0] ?? 0) - 1, (xs[0] ?? 0) + 1];
    const plot = frame(width, height, {xRange, yRange, xUnit: data.xUnit, yUnit: data.yUnit, yLog: isLog, label: data.label});
    const {root, x, y, box: area} = plot;
    const labels = [];
    for (const mark of data.marks ?? []) {
      if (mark.x < xRange[0] || mark.x > xRange[1]) continue;
      const at = x(mark.x), toLeft = at > area.right - 110;
      root.append(svg("line", {class: `mark ${mark.kind}`, x1: at, x2: at, y1: area.top, y2: area.bottom}));
      labels.push(svg("text", {class: `marked ${mark.kind}`, x: at + (toLeft ? -4 : 4), y: area.top + 10,
        "text-anchor": toLeft ? "end" : "start"}, mark.label));
    }
    data.series.forEach((one, k) => root.append(...curve(one, k, plot, isLog)));
    root.append(...labels);  // over the curves
    const line = svg("line", {class: "cursor", y1: area.top, y2: area.bottom, visibility: "hidden"});
    const dots = data.series.map((_, k) => svg("circle", {class: `dot c${k % 8}`, r: 4, visibility: "hidden"}));
    root.append(line, ...dots);
    box.replaceChildren(root);

    function show(index) {
      cursor = Math.max(0, Math.min(xs.length - 1, index));
      const value = xs[cursor], at = x(value), told = [];
      line.setAttribute("x1", at); line.setAttribute("x2", at); line.setAttribute("visibility", "visible");
      data.series.forEach((one, k) => {
        const v = looked[k].get(value), shown = Number.isFinite(v) && (!isLog || v > 0);
        dots[k].setAttribute("visibility", shown ? "visible" : "hidden");
        if (shown) { dots[k].setAttribute("cx", at); dots[k].setAttribute("cy", y(v)); }
        if (v !== undefined) told.push(`${data.series.length > 1 ? one.name + " " : ""}${v === null ? one.gap ?? "not finite" : formatted(v, data.yUnit)}`);
      });
      says.classList.remove("hint");
      says.textContent = `${data.xName} ${formatted(value, data.xUnit) || number(value)}: ${told.slice(0, 8).join(", ")}`;
    }
    root.addEventListener("pointermove", (event) => {
      const share = (event.offsetX - area.left) / (area.right - area.left || 1);
      const wanted = xRange[0] + share * (xRange[1] - xRange[0]);
      let low = 0, high = xs.length - 1;
      while (low < high) { const mid = (low + high) >> 1; if (xs[mid] < wanted) low = mid + 1; else high = mid; }
      show(low > 0 && wanted - xs[low - 1] < xs[low] - wanted ? low - 1 : low);
    });
    box.onkeydown = (event) => {
      const by = {ArrowRight: 1, ArrowLeft: -1, PageDown: 10, PageUp: -10, Home: -1e9, End: 1e9}[event.key];
      if (by === undefined || !xs.length) return;
      event.preventDefault();
      show(cursor < 0 ? (by < 0 ? xs.length - 1 : 0) : cursor + by);
    };
  }
  if (button) button.onclick = () => {
    isLog = !isLog;
    button.setAttribute("aria-pressed", String(isLog));
    draw(Math.floor(box.clientWidth));
  };
  redrawn(box, draw);
}

/** The marks of one curve: pieces between gaps, single points as dots, a cross where a value is no number. */
function curve(one, index, {x, y, box}, isLog) {
  const style = `c${index % 8}`, out = [];
  let path = "", alone = [], run = 0, before = null;
  const close = () => { if (run === 1) alone.push(before); run = 0; };
  for (const [at, value] of one.points) {
    if (value === null || !Number.isFinite(value) || (isLog && value <= 0)) {
      close();
      if (value === null && one.gap) {
        const cx = x(at), cy = box.top + 14 + 14;
        out.push(svg("path", {class: "cross", d: `M${cx - 5} ${cy - 5}l10 10M${cx - 5} ${cy + 5}l10 -10`}));
      }
      continue;
    }
    path += `${run ? "L" : "M"}${x(at).toFixed(1)} ${y(value).toFixed(1)}`;
    run += 1; before = [at, value];
  }
  close();
  if (path) out.push(svg("path", {class: `curve ${style}`, d: path}));
  const few = one.points.length <= 40 ? one.points.filter((p) => p[1] !== null && (!isLog || p[1] > 0)) : alone;
  for (const [at, value] of few) out.push(svg("circle", {class: `dot ${style}`, cx: x(at), cy: y(value), r: 2.5}));
  return out;
}
