function render({ model, el }) {
  const row = document.createElement("div");  // el's own style is ipywidgets' to write
  const label = document.createElement("label"), name = document.createElement("span");
  const input = document.createElement("input"), shown = document.createElement("output");
  label.style = "display:flex;align-items:center;flex:1;gap:8px";
  name.style = "width:162px;text-align:right";
  input.style = "flex:1;min-width:0";
  shown.style = "width:64px;margin-left:8px";
  row.style = "display:flex;align-items:center;width:380px;height:32px;margin:0 2px";
  Object.assign(input, { type: "range", min: 0, step: 1 });
  input.dataset.lmSuppressShortcuts = "true";  // JupyterLab would take the arrow keys for its own
  const spell = () => {
    shown.textContent = model.get("spelled")[input.valueAsNumber];
    input.setAttribute("aria-valuetext", shown.textContent);
  };
  const put = () => {
    name.textContent = model.get("description");
    row.title = model.get("tooltip");
    input.max = model.get("spelled").length - 1;
    input.value = model.get("index");
    spell();
  };
  const send = () => {
    model.set("index", input.valueAsNumber);
    model.save_changes();
  };
  input.addEventListener("input", () => { spell(); if (model.get("continuous_update")) send(); });
  input.addEventListener("change", send);
  model.on("change", put);
  put();
  label.append(name, input);
  row.append(label, shown);
  el.append(row);
}
export default { render };
