"use strict";
// Figures with their menus were made in Python; here they are drawn.
{
  const dark = matchMedia("screen and (prefers-color-scheme: dark)"), narrow = matchMedia("(max-width: 640px)");
  const { figures, templates } = JSON.parse(document.getElementById("data").textContent);
  const drawn = [];
  for (const holder of typeof Plotly === "undefined" ? [] : document.querySelectorAll("figure")) {
    const figure = figures[holder.dataset.plot], { height, legend, margin } = figure.layout;
    const plot = holder.querySelector(".plot"), fold = holder.closest("details");
    const config = { displaylogo: false, responsive: true, displayModeBar: narrow.matches ? false : "hover",
      modeBarButtons: [["toImage", "zoom2d", "pan2d", "resetScale2d"]] };
    // On a phone the names of the curves stand below them, and the figure is as high as they need.
    const names = holder.closest(".grid") ? [] : figure.data.filter(trace => trace.showlegend && trace.visible !== false);
    const wide = names.some(trace => trace.name.replace(/<[^>]*>/g, "").length > 20); // one in a row
    const rows = Math.ceil(names.length / (wide ? 1 : 2)), below = 19 * rows;
    const look = () => {
      const phone = narrow.matches, over = rows && phone, under = figure.layout.xaxis?.title?.text ?? "";
      plot.style.height = `${over ? 350 + below : height}px`;
      return {
        ...(under.includes(", ") ? { xaxis: { ...figure.layout.xaxis, title: { text: phone ? under.replace(", ", ",<br>") : under } } } : {}),
        "font.size": phone ? 11 : 12, dragmode: phone ? false : "zoom", template: templates[dark.matches ? "dark" : "light"],
        margin: over ? { l: 8, r: 8, t: 50, b: 50 + below } : margin,
        legend: over ? { orientation: "h", x: 0, y: -0.24, yanchor: "top", traceorder: "normal", maxheight: below + 20 } : legend,
      };
    };
    plot.replaceChildren();
    drawn.push(Plotly.newPlot(plot, figure.data, { ...figure.layout, height: undefined, ...look() }, config));
    for (const media of [dark, narrow]) media.addEventListener("change", () => Plotly.relayout(plot, look()));
    if (fold) fold.addEventListener("toggle", () => Plotly.Plots.resize(plot));
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
