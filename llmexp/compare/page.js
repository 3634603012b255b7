"use strict";
// Figures and what their controls change were made in Python; here they are drawn.
{
  const dark = matchMedia("screen and (prefers-color-scheme: dark)"), narrow = matchMedia("(max-width: 640px)");
  const { figures, templates } = JSON.parse(document.getElementById("data").textContent);
  const drawn = [];
  for (const holder of typeof Plotly === "undefined" ? [] : document.querySelectorAll("figure")) {
    const { figure, wide, small, choices } = figures[holder.dataset.plot];
    const plot = holder.querySelector(".plot"), fold = holder.closest("details");
    const config = { displaylogo: false, responsive: true, displayModeBar: narrow.matches ? false : "hover",
      modeBarButtons: [["toImage", "zoom2d", "pan2d", "resetScale2d"]] };
    const look = () => {
      const { height, ...layout } = narrow.matches ? small : wide;
      plot.style.height = `${height}px`;
      return { ...layout, template: templates[dark.matches ? "dark" : "light"] };
    };
    plot.replaceChildren();
    drawn.push(Plotly.newPlot(plot, figure.data, { ...figure.layout, ...look() }, config));
    for (const media of [dark, narrow]) media.addEventListener("change", () => Plotly.relayout(plot, look()));
    if (fold) fold.addEventListener("toggle", () => Plotly.Plots.resize(plot));
    for (const control of holder.querySelectorAll("[name]")) control.addEventListener("input", () => {
      Plotly.update(plot, ...choices[control.name][control.value]);
      const output = control.nextElementSibling;
      if (output) output.textContent = JSON.parse(output.dataset.words)[control.value];
    });
  }
  const sorted = (row, column) => row.cells[column].dataset.value ?? row.cells[column].textContent;
  for (const button of document.querySelectorAll(".runs button")) button.addEventListener("click", () => {
    const column = button.parentNode.cellIndex, rows = button.closest("table").tBodies[0];
    const sign = button.dataset.order === "up" ? -1 : 1;
    button.dataset.order = sign > 0 ? "up" : "down";
    const compare = new Intl.Collator(undefined, { numeric: true }).compare;
    rows.append(...[...rows.rows].sort((a, b) => {
      const [x, y] = [sorted(a, column), sorted(b, column)];
      return (x === "") - (y === "") || sign * (x - y || compare(x, y));
    }));
  });
  Promise.all(drawn).then(() => { document.documentElement.dataset.ready = "yes"; });
}
