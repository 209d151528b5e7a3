"use strict";
// The page: reads the numbers, draws each plot into its figure, keeps the chosen theme.

const data = JSON.parse(document.getElementById("data").textContent);
const figureOf = (id) => document.getElementById(id);

for (const plot of data.lines) linePlot(figureOf(plot.id), plot);
if (data.stack) stackPlot(figureOf("stack"), data.stack);
const showStep = data.steps ? stepPlot(figureOf("steps"), data.steps) : null;
if (data.heat) heatPlot(figureOf("heat"), data.heat, showStep);

const theme = document.getElementById("theme");
const isDark = () => (document.documentElement.dataset.theme ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
const tell = () => { theme.textContent = isDark() ? "light" : "dark"; };
theme.onclick = () => { document.documentElement.dataset.theme = isDark() ? "light" : "dark"; tell(); };
tell();
document.documentElement.dataset.drawn = "yes";
