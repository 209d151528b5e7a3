"use strict";
// Ranks below each other: where a step's time goes, the heat map over time, and the moments of one step.

/** Arrow keys walk over `cells` (rows of elements with a `told` text); the chosen one is outlined and read out. */
function walkable(box, says, cells, chosen) {
  let row = -1, column = 0;
  const pick = (r, c, isKey) => {
    if (!cells.length) return;
    row = Math.max(0, Math.min(cells.length - 1, r));
    if (!cells[row].length) return;
    column = Math.max(0, Math.min(cells[row].length - 1, c));
    box.querySelectorAll(".chosen").forEach((e) => e.classList.remove("chosen"));
    const cell = cells[row][column];
    cell.classList.add("chosen");
    if (isKey) cell.scrollIntoView?.({block: "nearest", inline: "nearest"});
    says.classList.remove("hint");
    says.textContent = cell.told;
  };
  cells.forEach((line, r) => line.forEach((cell, c) => {
    cell.addEventListener("pointerenter", () => pick(r, c, false));
    if (chosen) cell.addEventListener("click", () => { pick(r, c, false); chosen(r, c); });
  }));
  box.onkeydown = (event) => {
    const [dr, dc] = {ArrowDown: [1, 0], ArrowUp: [-1, 0], ArrowRight: [0, 1], ArrowLeft: [0, -1],
      PageDown: [0, 10], PageUp: [0, -10], Home: [0, -1e9], End: [0, 1e9]}[event.key] ?? [0, 0];
    if (dr || dc) { event.preventDefault(); row < 0 ? pick(0, 0, true) : pick(row + dr, column + dc, true); }
    else if ((event.key === "Enter" || event.key === " ") && chosen && row >= 0) { event.preventDefault(); chosen(row, column); }
  };
}

/** Hatches and dots, so that parts differ without their colours. */
function patterns(root) {
  const make = (id, style, ...marks) => svg("pattern", {id, width: 6, height: 6, patternUnits: "userSpaceOnUse"},
    svg("rect", {width: 6, height: 6, class: `${style} ground`}), ...marks);
  root.append(svg("defs", {},
    make("hatch-waiting", "p-waiting", svg("path", {d: "M-1 1l2 -2M0 6l6 -6M5 7l2 -2", class: "hatch"})),
    make("hatch-exchange", "p-exchange", svg("path", {d: "M-1 5l2 2M0 0l6 6M5 -1l2 2", class: "hatch"})),
    make("hatch-log", "p-log", svg("circle", {cx: 3, cy: 3, r: 1.2, class: "spot"})),
    make("hatch-collective", "p-collective", svg("path", {d: "M0 3h6M3 0v6", class: "hatch"})),
    make("hatch-checkpoint", "p-checkpoint", svg("path", {d: "M0 3h6M3 0v6", class: "hatch"}))));
  return root;
}

/** Where there is little room the host is left out; it is in what a cell says. */
const shortened = (names, width) => (width < 520 ? names.map((n) => n.split(" ").slice(0, 2).join(" ")) : names);
const nameRoom = (width, names) => Math.min(width * 0.3, 14 + 7 * Math.max(...names.map((n) => n.length)));
const cut = (text, room) => (text.length * 7 > room ? text.slice(0, Math.max(1, Math.floor(room / 7) - 1)) + "\u2026" : text);

/** Stacked bars. `data`: {label, rows: [{name, parts: [[key, ms], ...]}], names: {key: text}}. */
function stackPlot(figure, data) {
  const box = figure.querySelector(".plot"), says = figure.querySelector(".says");
  redrawn(box, (width) => {
    const line = 30, height = data.rows.length * line + 38, names = shortened(data.rows.map((r) => r.name), width);
    const left = nameRoom(width, names) + 8;
    const totals = data.rows.map((r) => r.parts.reduce((sum, [, ms]) => sum + ms, 0));
    const {root, x, box: area} = frame(width, height, {xRange: [0, Math.max(...totals) || 1], yRange: [0, 1],
      xUnit: "ms", yUnit: null, left, label: data.label});
    patterns(root);
    const cells = data.rows.map((row, r) => {
      const y = area.top + r * line;
      root.append(svg("text", {class: "name", x: left - 8, y: y + 17, "text-anchor": "end"}, cut(names[r], left)));
      let at = 0;
      return row.parts.filter(([, ms]) => ms > 0).map(([key, ms]) => {
        const from = x(at), wide = Math.max(0.5, x(at + ms) - from - 1);
        at += ms;
        const cell = svg("rect", {class: `part p-${key}`, x: from, y, width: wide, height: line - 6});
        cell.told = `${row.name}: ${data.names[key]} ${span(ms)}, ${number((100 * ms) / totals[r], 3)} % of its step of ${span(totals[r])}`;
        root.append(cell);
        const text = wide > 7 * data.names[key].length + 60 ? `${data.names[key]} ${span(ms)}` : wide > 56 ? span(ms) : "";
        if (text) root.append(svg("text", {class: `in p-${key}-text`, x: from + 6, y: y + 16}, text));
        return cell;
      });
    });
    box.replaceChildren(root);
    walkable(box, says, cells);
  });
}

/** Ranks x time. `data`: {label, kinds: [{key, name, unit}], rows: [{name, spans: [[from_s, to_s]], values: {key: [...]}}]}. */
function heatPlot(figure, data, chosen) {
  const box = figure.querySelector(".plot"), says = figure.querySelector(".says"), select = figure.querySelector("select");
  const scale = figure.querySelector(".scale");
  const first = Math.min(...data.rows.map((r) => r.spans[0][0])), last = Math.max(...data.rows.map((r) => r.spans.at(-1)[1]));
  let drawn = 0;
  const draw = (width) => {
    drawn = width;
    const kind = data.kinds[select.selectedIndex], names = shortened(data.rows.map((r) => r.name), width);
    const line = Math.max(8, Math.min(28, Math.floor(360 / names.length))), left = nameRoom(width, names) + 8;
    const {root, x, box: area} = frame(width, names.length * line + 38, {xRange: [first, last], yRange: [0, 1], xUnit: "clock",
      yUnit: null, left, label: `${data.label}: ${kind.name}`});
    const known = data.rows.flatMap((r) => r.values[kind.key]).filter((v) => v !== null).sort((a, b) => a - b);
    // A single pause of a minute must not make everything else one colour: the scale ends at the 98th percentile.
    // Nor may noise look like a straggler: it covers a fifth of the median at least.
    const low = known[0] ?? 0, middle = known[known.length >> 1] ?? 0;
    const high = Math.max(known[Math.floor(0.98 * (known.length - 1))] ?? 1, low + middle / 5);
    const cells = data.rows.map((row, r) => {
      const y = area.top + r * line;
      if (line >= 12 || r % Math.ceil(12 / line) === 0)
        root.append(svg("text", {class: "name", x: left - 8, y: y + line / 2 + 4, "text-anchor": "end"}, cut(names[r], left)));
      return row.spans.map(([from, to], c) => {
        const value = row.values[kind.key][c], share = high > low ? (value - low) / (high - low) : 0;
        const cell = svg("rect", {class: `cell ${heatClass(share)}`, x: x(from), y,
          width: Math.max(1, x(to) - x(from) - 1), height: line - 1});
        cell.told = `${row.name}, ${clock(from)} to ${clock(to)}: ${kind.name} ${formatted(value, kind.unit)}`;
        root.append(cell);
        return cell;
      });
    });
    box.replaceChildren(root);
    scale.replaceChildren(html("span", {}, formatted(low, kind.unit)), ...Array.from({length: 12}, (_, k) => html("i", {class: `h${k}`})),
      html("span", {}, `${formatted(high, kind.unit)} or more`));
    walkable(box, says, cells, chosen && ((r, c) => chosen((data.rows[r].spans[c][0] + data.rows[r].spans[c][1]) / 2)));
  };
  select.onchange = () => draw(drawn);
  redrawn(box, draw);
}

/** One step on all ranks. `data`: {names, rows: [name], steps: [{step, at_s, note, ranks: [{parts: [[key, from, to]], calls: [[from, to, op, id, line]], ready}]}]}; ms. */
function stepPlot(figure, data) {
  const box = figure.querySelector(".plot"), says = figure.querySelector(".says"), select = figure.querySelector("select");
  const note = figure.querySelector(".note"), table = figure.querySelector("tbody");
  const [back, on] = figure.querySelectorAll("button.turn");
  let drawn = 0;
  const draw = (width) => {
    drawn = width;
    const step = data.steps[select.selectedIndex];
    const hasCalls = step.ranks.some((r) => r.calls.length), line = hasCalls ? 40 : 30, height = data.rows.length * line + 38;
    const names = shortened(data.rows, width), left = nameRoom(width, names) + 8;
    const ends = step.ranks.flatMap((r) => [...r.parts.map((p) => p[2]), ...r.calls.map((c) => c[1])]);
    const begins = step.ranks.flatMap((r) => [...r.parts.map((p) => p[1]), ...r.calls.map((c) => c[0])]);
    const {root, x, box: area} = frame(width, height, {xRange: [Math.min(...begins), Math.max(...ends)], yRange: [0, 1], xUnit: "ms",
      yUnit: null, left, label: `Step ${step.step} on all ranks`});
    patterns(root);
    const meetings = new Map([["gradients", []]]);
    const cells = data.rows.map((name, r) => {
      const y = area.top + r * line, rank = step.ranks[r];
      root.append(svg("text", {class: "name", x: left - 8, y: y + 17, "text-anchor": "end"}, cut(names[r], left)));
      const parts = rank.parts.map(([key, from, to]) => {
        const cell = svg("rect", {class: `part p-${key}`, x: x(from), y, width: Math.max(0.5, x(to) - x(from) - 0.5), height: 24});
        cell.told = `${name}: ${data.names[key]} ${span(to - from)}, from ${span(from)} to ${span(to)}`;
        root.append(cell);
        if (x(to) - x(from) > 7 * data.names[key].length + 14)
          root.append(svg("text", {class: `in p-${key}-text`, x: x(from) + 6, y: y + 16}, data.names[key]));
        return cell;
      });
      if (rank.ready !== null) meetings.get("gradients").push([x(rank.ready), y], [x(rank.ready), y + 24]);
      const calls = rank.calls.map(([from, to, op, id, where]) => {
        const cell = svg("rect", {class: "call", x: x(from), y: y + 26, width: Math.max(2, x(to) - x(from)), height: 8});
        cell.told = `${name}: ${op} ${span(to - from)}, entered at ${span(from)}${where ? ", " + where : ""}`;
        root.append(cell);
        if (id) meetings.set(id, [...(meetings.get(id) ?? []), [x(from), y + 30]]);
        return cell;
      });
      return [...parts, ...calls];
    });
    // Where the ranks entered one collective: a line from each to the next. The further it leans, the longer somebody waited.
    for (const points of meetings.values())
      if (points.length > 1) root.append(svg("polyline", {class: "meeting", points: points.map((p) => p.join(",")).join(" ")}));
    box.replaceChildren(root);
    note.textContent = step.note;
    table.replaceChildren(...cells.flat().map((cell) => html("tr", {}, html("td", {}, cell.told))));
    walkable(box, says, cells);
  };
  const choose = (index) => { select.selectedIndex = Math.max(0, Math.min(data.steps.length - 1, index)); draw(drawn); };
  select.onchange = () => draw(drawn);
  back.onclick = () => choose(select.selectedIndex - 1);
  on.onclick = () => choose(select.selectedIndex + 1);
  redrawn(box, draw);
  return (at_s) => {
    const away = data.steps.map((s) => Math.abs(s.at_s - at_s));
    choose(away.indexOf(Math.min(...away)));
    figure.scrollIntoView({block: "nearest"});
  };
}
