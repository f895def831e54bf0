"use strict";
// Sortable tables, the split chooser, and the threshold slider. Everything is computed from the data block in this page.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);

  const bytes = (text) => Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  const doubles = (text) => new Float64Array(bytes(text).buffer);
  for (const series of data.series) {
    series.splits = Object.fromEntries(
      Object.entries(series.splits).map(([name, runs]) => [
        name,
        runs.map((run) => ({ p: doubles(run.p_value), accuracy: doubles(run.accuracy) })),
      ]),
    );
  }

  // PAvPU = mean of Acc·Cer + (1 − Acc)(1 − Cer); a prediction is certain if its p-value is at most the threshold
  const measure = ({ p, accuracy }, threshold) => {
    let certain = 0, right = 0, agree = 0, total = 0;
    for (let i = 0; i < p.length; i++) {
      total += accuracy[i];
      if (p[i] <= threshold) { certain += 1; right += accuracy[i]; agree += accuracy[i]; }
      else { agree += 1 - accuracy[i]; }
    }
    const n = p.length;
    return { coverage: certain / n, certain: certain ? right / certain : NaN, accuracy: total / n, pavpu: agree / n };
  };
  const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;
  const show = (value) => (Number.isFinite(value) ? value.toFixed(4) : "–");

  const slider = document.getElementById("threshold");
  const exact = document.getElementById("threshold-exact");
  const split = document.getElementById("threshold-split");
  const body = document.getElementById("threshold-rows");
  // the slider is logarithmic, from 1e-4 to 1
  const fromSlider = (position) => Number((10 ** (-4 + (4 * position) / 1000)).toPrecision(3));
  const toSlider = (threshold) => Math.round((1000 * (Math.log10(Math.max(threshold, 1e-4)) + 4)) / 4);

  const update = (threshold) => {
    slider.setAttribute("aria-valuetext", `p-value at most ${threshold}`);
    for (const row of body.rows) {
      const runs = data.series[Number(row.dataset.series)].splits[split.value];
      const measured = runs.map((run) => measure(run, threshold));
      for (const cell of row.querySelectorAll("td[data-metric]")) {
        const value = mean(measured.map((m) => m[cell.dataset.metric]).filter(Number.isFinite));
        cell.textContent = show(value);
        cell.dataset.value = String(value);
      }
    }
  };
  if (slider) {
    slider.addEventListener("input", () => { exact.value = fromSlider(Number(slider.value)); update(Number(exact.value)); });
    exact.addEventListener("input", () => {
      const threshold = Number(exact.value);
      if (exact.value === "" || !(threshold >= 0 && threshold <= 1)) return;
      slider.value = toSlider(threshold);
      update(threshold);
    });
    split.addEventListener("input", () => update(Number(exact.value)));
    update(Number(exact.value));
  }

  const chooser = document.getElementById("metric-split");
  if (chooser) {
    const tables = [...document.querySelectorAll("[data-split]")];
    const choose = () => tables.forEach((table) => { table.hidden = table.dataset.split !== chooser.value; });
    chooser.addEventListener("input", choose);
    choose();
  }

  for (const button of document.querySelectorAll("th button")) {
    button.addEventListener("click", () => {
      const head = button.closest("th");
      const column = [...head.parentElement.children].indexOf(head);
      const ascending = head.getAttribute("aria-sort") !== "ascending";
      for (const other of head.parentElement.children) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", ascending ? "ascending" : "descending");
      const rows = head.closest("table").tBodies[0];
      const key = (row) => row.children[column].dataset.value ?? row.children[column].textContent;
      const isNumber = [...rows.rows].some((row) => row.children[column].dataset.value !== undefined);
      const compare = (a, b) => {
        if (!isNumber) return key(a).localeCompare(key(b));
        // cells without a number stay at the end, whichever way the rest is sorted
        const [x, y] = [Number.parseFloat(key(a)), Number.parseFloat(key(b))];
        if (Number.isNaN(x) || Number.isNaN(y)) return (Number.isNaN(x) - Number.isNaN(y)) * (ascending ? 1 : -1);
        return x - y;
      };
      const ordered = [...rows.rows].sort((a, b) => (ascending ? 1 : -1) * compare(a, b));
      rows.append(...ordered);
    });
  }
})();
