// Elements by function, and rows that keep their identity while what they show changes: a page that is redrawn every
// second must not take focus, selection or scrolling from whoever reads it. Text is always text, never markup.

const SVG = "http://www.w3.org/2000/svg";

export function h(tag, properties = {}, ...children) {
  return fill(document.createElement(tag), properties, children);
}

export function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(element, properties, children) {
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name === "className" ? "class" : name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

export const byId = (id) => document.getElementById(id);

export function setText(element, text) {
  if (element.textContent !== String(text)) element.textContent = text;
}

export function setClass(element, name) {
  if (element.getAttribute("class") !== name) element.setAttribute("class", name);
}

// Children of `parent`, one for each item in order. `make(item)` gives {element, update(item)}, once for each key.
export function keyed(parent, items, keyOf, make) {
  const known = parent.keyed ?? new Map();
  const kept = new Map();
  let at = parent.firstElementChild;
  for (const item of items) {
    const key = keyOf(item);
    const row = known.get(key) ?? make(item);
    row.update(item);
    kept.set(key, row);
    if (row.element === at) at = at.nextElementSibling;
    else parent.insertBefore(row.element, at);
  }
  for (const [key, row] of known) if (!kept.has(key)) row.element.remove();
  parent.keyed = kept;
}

// A table with a hidden caption, a head, and a body for `keyed`. Columns: {title, number, wide}.
export function tableOf(table, caption, columns) {
  const heads = columns.map(({ title, number, wide }) =>
    h("th", { scope: "col", className: classes(number && "number", wide && "wide") }, title));
  const body = h("tbody");
  table.setAttribute("aria-label", caption);
  table.replaceChildren(h("thead", {}, h("tr", {}, ...heads)), body);
  return body;
}

export function classes(...names) {
  return names.filter(Boolean).join(" ") || null;
}

// A row whose cells are told by column: each {cell(item) -> text or node, number, wide, className(item)}.
export function rowOf(columns) {
  const cells = columns.map(({ number, wide, text, isHead }) =>
    h(isHead ? "th" : "td", {
      scope: isHead ? "row" : null,
      className: classes(number && "number", wide && "wide", text && "text"),
    }));
  const element = h("tr", {}, ...cells);
  return {
    element,
    update(item) {
      columns.forEach(({ show, part }, index) => {
        if (part) {
          cells[index].shown ??= part(item);
          if (!cells[index].firstChild) cells[index].append(cells[index].shown.element);
          cells[index].shown.update(item);
        } else setText(cells[index], show(item));
      });
    },
  };
}
