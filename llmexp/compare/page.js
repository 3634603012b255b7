"use strict";
(() => {
  const $ = (id) => document.getElementById(id);
  const all = (selector, from = document) => [...from.querySelectorAll(selector)];
  const variable = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  // Tables: the value to sort by is in data-value; what has none stays at the bottom in both directions.
  function sortBy(header) {
    const table = header.closest("table");
    const column = header.cellIndex;
    const before = header.getAttribute("aria-sort");
    const first = header.dataset.better === "higher" ? "descending" : "ascending";
    const order = before === "ascending" ? "descending" : before === "descending" ? "ascending" : first;
    const sign = order === "ascending" ? 1 : -1;
    const value = (row) => row.cells[column].dataset.value ?? row.cells[column].textContent.trim();
    const compare = (a, b) => {
      const [x, y] = [value(a), value(b)];
      if (x === "" || y === "") return (x === "") - (y === "");
      const [m, n] = [Number(x), Number(y)];
      if (!Number.isNaN(m) && !Number.isNaN(n)) return sign * (m - n);
      if (Number.isNaN(m) !== Number.isNaN(n)) return sign * (Number.isNaN(m) - Number.isNaN(n));
      return sign * x.localeCompare(y, undefined, { numeric: true });
    };
    for (const other of table.tHead.rows[0].cells) if (other.hasAttribute("aria-sort")) other.setAttribute("aria-sort", "none");
    header.setAttribute("aria-sort", order);
    table.tBodies[0].append(...[...table.tBodies[0].rows].sort(compare));
  }
  for (const header of all("th[aria-sort]")) header.addEventListener("click", () => sortBy(header)); // its button included

  // Colours: distinct ones for a few lines; for many the place in the order, the best one strongest.
  const FEW = ["#4269d0", "#e3891b", "#d9485f", "#2fa58e", "#8a5cd6", "#3c9d45", "#c463a8", "#7f8ba0", "#9c6b4e", "#2b9cc4"];
  const RAMP = {
    light: ["#3b1670", "#3a4f9e", "#25819a", "#3fab7b", "#a9bd3a", "#e0b43c"],
    dark: ["#ffd166", "#c3d15a", "#5cc88c", "#3fa7b5", "#5d83cf", "#7a64b0"],
  };
  const dark = () => matchMedia("(prefers-color-scheme: dark)").matches && !document.documentElement.hasAttribute("data-paper");
  const channels = (hex) => [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));
  const faded = (hex, alpha) => `rgba(${channels(hex).join(",")},${alpha})`;
  let count = 0;
  function colour(entry) {
    if (count <= FEW.length) return FEW[entry];
    const ramp = RAMP[dark() ? "dark" : "light"];
    const place = (entry / (count - 1)) * (ramp.length - 1);
    const low = Math.min(Math.floor(place), ramp.length - 2);
    const [a, b] = [channels(ramp[low]), channels(ramp[low + 1])];
    return "#" + a.map((v, i) => Math.round(v + (b[i] - v) * (place - low)).toString(16).padStart(2, "0")).join("");
  }
  const swatches = () => {
    for (const swatch of all(".swatch[data-entry]")) swatch.style.background = colour(Number(swatch.dataset.entry));
  };

  let data = {};
  const hidden = new Set();
  // Plotly reads a small markup in its texts; what comes from a run is text and nothing else.
  const text = (value) => String(value).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
  const shown = (item) => !hidden.has(item.entry);

  function draw(id, traces, layout) {
    const [ink, muted, line, paper] = ["--text", "--muted", "--line", "--bg"].map(variable);
    const axis = (more = {}) => ({
      gridcolor: line, zeroline: false, linecolor: line, tickcolor: line, automargin: true, ticks: "",
      ...(more.type === "log" ? { tickformat: ",.6~g" } : {}), // else 0.2 and 20 are both a small "2"
      ...more, title: { text: more.title ?? "", font: { size: 12, color: muted }, standoff: 8 },
    });
    const narrow = matchMedia("(max-width: 640px)").matches;
    const touch = matchMedia("(pointer: coarse)").matches;
    const base = {
      font: { family: "system-ui, 'Segoe UI', Roboto, 'Liberation Sans', sans-serif", size: narrow ? 11 : 12, color: ink },
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", showlegend: false, hovermode: "closest",
      margin: { l: 8, r: 12, t: 14, b: 8 }, dragmode: touch ? false : "zoom",
      hoverlabel: { bgcolor: paper, bordercolor: line, font: { color: ink }, align: "left", namelength: -1 },
      modebar: { bgcolor: "rgba(0,0,0,0)", color: muted, activecolor: ink },
    };
    const config = {
      displaylogo: false, responsive: true, displayModeBar: touch ? false : "hover",
      modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d", "zoomIn2d", "zoomOut2d"],
    };
    return Plotly.react($(id), traces, { ...base, ...layout, xaxis: axis(layout.xaxis), yaxis: axis(layout.yaxis) }, config);
  }

  const hover = (name, x, y) => `<b>${text(name)}</b><br>${text(x)} %{x:,.6~g}<br>${text(y)} %{y:.6~g}<extra></extra>`;

  function curves() {
    const axis = $("axis").value;
    const quantity = $("quantity").value;
    const both = quantity === "loss";
    const traces = [];
    const marked = count <= 40; // thousands of markers are slow to draw, and hide the lines
    for (const key of both ? ["train/loss", "val/loss"] : [quantity]) {
      const val = key.startsWith("val/");
      for (const item of [...data.curves[key]].reverse()) { // the best one last, so on top
        if (!shown(item) || !item[axis]) continue;
        const line = { color: faded(colour(item.entry), both && !val ? 0.4 : 1), width: both && !val ? 1 : 1.6 };
        traces.push({
          type: "scatter", mode: val && marked ? "lines+markers" : "lines", x: item[axis], y: item.y, line, name: text(item.run),
          marker: { color: colour(item.entry), size: count > 6 ? 4.5 : 6 },
          hovertemplate: hover(item.run, data.axes[axis], key),
        });
      }
    }
    const at = data.align?.axis === axis ? data.align.at : null;
    const shapes = at == null ? [] : [{
      type: "line", x0: at, x1: at, y0: 0, y1: 1, yref: "paper", line: { color: variable("--muted"), width: 1, dash: "dot" },
    }];
    const title = both ? "Loss (nats per token)" : data.quantities[quantity];
    const type = $("log").checked ? "log" : "linear";
    return draw("curves-plot", traces, { xaxis: { title: data.axes[axis] }, yaxis: { title, type }, shapes });
  }

  function heat() {
    const map = data.heat;
    const figure = map.figures[Number($("figure").value)];
    const reverse = figure.better === "lower";
    const known = figure.z.flat().filter((z) => z != null);
    const [low, high] = ["--heat-low", "--heat-high"].map((name) => channels(variable(name)));
    const [least, most] = [Math.min(...known), Math.max(...known)];
    // Black or white on a cell, whichever its own colour lets one read.
    const ink = (z) => {
      const t = ((v) => (reverse ? 1 - v : v))(most > least ? (z - least) / (most - least) : 0.5);
      const [r, g, b] = low.map((v, i) => (v + (high[i] - v) * t) / 255);
      return 0.3 * r + 0.59 * g + 0.11 * b > 0.52 ? "#10151f" : "#ffffff";
    };
    const words = { x: [], y: [], text: [], color: [] };
    figure.z.forEach((row, i) => row.forEach((z, j) => {
      const state = map.states[i][j];
      const word = state == null || state === "finished" ? "" : text(state);
      words.x.push(j);
      words.y.push(i);
      words.text.push([figure.texts[i][j], word].filter(Boolean).join("<br>"));
      words.color.push(z == null ? variable("--muted") : ink(z));
    }));
    const shapes = figure.best.map(([i, j]) => ({
      type: "rect", x0: j - 0.5, x1: j + 0.5, y0: i - 0.5, y1: i + 0.5, line: { color: variable("--text"), width: 2 },
    }));
    const colours = [[0, variable("--heat-low")], [1, variable("--heat-high")]];
    // Places are numbers, not Plotly's categories: "1" and "1.0" stay two values, in the order of the data.
    const ticks = (axis) => ({
      title: text(axis.title), tickvals: axis.levels.map((_, i) => i), ticktext: axis.levels.map(text), showgrid: false, showline: false,
      range: [-0.51, axis.levels.length - 0.49],
    });
    $("heat-plot").style.height = `${Math.max(310, 110 + 62 * map.y.levels.length)}px`;
    return draw("heat-plot", [{
      type: "heatmap", z: figure.z, hoverongaps: false, xgap: 3, ygap: 3,
      customdata: figure.z.map((row, i) => row.map((_, j) => [
        `${text(map.x.title)} = ${text(map.x.levels[j])}`, `${text(map.y.title)} = ${text(map.y.levels[i])}`, figure.texts[i][j],
      ].join("<br>"))),
      hovertemplate: "%{customdata}<extra></extra>", colorscale: colours, reversescale: reverse, showscale: false,
    }, {
      type: "scatter", mode: "text", hoverinfo: "skip", x: words.x, y: words.y, text: words.text, cliponaxis: false,
      textfont: { color: words.color },
    }], { xaxis: ticks(map.x), yaxis: ticks(map.y), shapes });
  }

  function parallel() {
    const axes = data.parallel.axes;
    const last = axes.length - 1;
    $("parallel-plot").style.minWidth = `${150 * axes.length}px`;
    const traces = data.entries.map((name, entry) => ({
      type: "scatter", mode: "lines+markers", x: axes.map((_, i) => i), y: axes.map((axis) => axis.places[entry]),
      visible: !hidden.has(entry), line: { color: faded(colour(entry), 0.75), width: 1.8 }, marker: { size: 5, color: colour(entry) },
      hovertemplate: `<b>${text(name)}</b><extra></extra>`,
    })).reverse();
    const line = variable("--line");
    const shapes = axes.map((_, i) => ({ type: "line", x0: i, x1: i, y0: -0.03, y1: 1.03, line: { color: line, width: 1.5 }, layer: "below" }));
    const annotations = axes.flatMap((axis, i) => [
      { x: i, y: 1.07, text: text(axis.title).replace(/[.]([^.]+)$/, ".<br>$1"), showarrow: false, yanchor: "bottom", font: { size: 11, color: variable("--muted") } },
      ...axis.ticks.map(([y, label]) => ({
        x: i, y, text: text(label), showarrow: false, xanchor: i === last ? "left" : "right", xshift: i === last ? 8 : -8,
        bgcolor: variable("--bg"), opacity: 0.9, font: { size: 11 },
      })),
    ]);
    return draw("parallel-plot", traces, {
      xaxis: { range: [-0.5, last + 0.5], visible: false, fixedrange: true },
      yaxis: { range: [-0.06, 1.2], visible: false, fixedrange: true }, shapes, annotations,
    });
  }

  function clip() {
    const traces = data.clip.filter(shown).map((item) => ({
      type: "scatter", mode: "lines+markers", x: item.limit, y: item.share, marker: { size: 5 },
      line: { color: colour(item.entry), width: 1.6 },
      hovertemplate: `<b>${text(item.run)}</b><br>limit %{x:.4~g}: %{y:.1%} of the steps<extra></extra>`,
    }));
    return draw("clip-plot", traces, {
      xaxis: { title: "Limit on the gradient norm", type: "log", dtick: "D2" },
      yaxis: { title: "Share of steps that it would clip", tickformat: ".0%", range: [-0.03, 1.03] },
    });
  }

  function noise() {
    const axis = ["tokens", "steps", "time"].find((a) => data.noise.some((item) => item[a]));
    const traces = [];
    const banded = data.noise.filter(shown).length <= 20; // more bands are a fog
    for (const item of data.noise.filter(shown)) {
      const [x, own] = [item[axis], colour(item.entry)];
      const flat = { type: "scatter", mode: "lines", x, hoverinfo: "skip" };
      if (banded && item.low && item.high) traces.push(
        { ...flat, y: item.low, line: { width: 0 } },
        { ...flat, y: item.high, line: { width: 0 }, fill: "tonexty", fillcolor: faded(own, count > 6 ? 0.06 : 0.15) },
      );
      traces.push({ ...flat, y: item.y, line: { color: own, width: 1.8 }, hoverinfo: "all", hovertemplate: hover(item.run, data.axes[axis], "noise scale") });
    }
    const sizes = [...new Set(data.noise.filter(shown).map((item) => item.real_batch_size).filter(Boolean))];
    const muted = variable("--muted");
    return draw("noise-plot", traces, {
      xaxis: { title: data.axes[axis] }, yaxis: { title: "Sequences", type: "log", dtick: "D2" },
      shapes: sizes.map((y) => ({ type: "line", xref: "paper", x0: 0, x1: 1, y0: y, y1: y, line: { color: muted, width: 1, dash: "dash" } })),
      annotations: sizes.slice(0, 8).map((y) => ({
        xref: "paper", x: 1, xanchor: "right", y: Math.log10(y), yanchor: "bottom", showarrow: false,
        text: `real_batch_size ${y}`, font: { size: 11, color: muted },
      })),
    });
  }

  const parts = { curves, heat, parallel, clip, noise };
  const redraw = (names = Object.keys(parts)) => Promise.all(names.filter((n) => $(`${n}-plot`)).map((n) => parts[n]()));
  const toggled = () => {
    for (const button of all(".legend button")) button.setAttribute("aria-pressed", String(!hidden.has(Number(button.dataset.entry))));
    redraw(["curves", "parallel", "clip", "noise"]);
  };
  const others = (entry) => data.entries.map((_, i) => i).filter((i) => i !== entry);
  function isolate(entry) {
    const alone = !hidden.has(entry) && others(entry).every((i) => hidden.has(i));
    hidden.clear();
    if (!alone) others(entry).forEach((i) => hidden.add(i));
    toggled();
  }
  function listen() {
    for (const button of all(".legend button")) {
      const entry = Number(button.dataset.entry);
      // A double click arrives as two clicks first: the second one is left to it, so that the curves are drawn twice only.
      button.addEventListener("click", (event) => {
        if (event.shiftKey) return isolate(entry);
        if (event.detail > 1) return;
        if (!hidden.delete(entry)) hidden.add(entry);
        toggled();
      });
      button.addEventListener("dblclick", (event) => {
        if (event.shiftKey) return;
        if (!hidden.delete(entry)) hidden.add(entry);
        isolate(entry);
      });
    }
    $("show-all")?.addEventListener("click", () => { hidden.clear(); toggled(); });
    for (const id of ["axis", "quantity", "log"]) $(id)?.addEventListener("change", curves);
    $("figure")?.addEventListener("change", heat);
    const recolour = () => { swatches(); redraw(); };
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", recolour);
    const paper = (on) => { document.documentElement.toggleAttribute("data-paper", on); recolour(); };
    addEventListener("beforeprint", () => paper(true));
    addEventListener("afterprint", () => paper(false));
  }

  async function unpacked(id) {
    const bytes = Uint8Array.from(atob($(id).textContent), (c) => c.charCodeAt(0));
    return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
  }
  async function start() {
    count = Number(document.body.dataset.entries);
    swatches();
    if (!$("plotly")) return;
    data = JSON.parse(await unpacked("data"));
    const script = document.createElement("script");
    script.textContent = await unpacked("plotly");
    document.head.append(script);
    listen();
    await redraw();
  }
  start().then(
    () => { document.documentElement.dataset.ready = "yes"; },
    (error) => {
      console.error(error);
      for (const plot of all(".plot")) plot.textContent = "The pictures could not be drawn; they need a browser of 2023 or later.";
    },
  );
})();
