"use strict";
// Put ahead of every page's own scripts: what a policy sees of the page and does there, one call each.
var rlflow = (() => {
  const CONTROLS = "a, button, input, textarea, select, option, [onclick], [role=button], [contenteditable=true]";
  const LEFT_OUT = "script, style, head *, defs *, #reward-display, #reward-display *, #click-canvas, #sync-task-cover, #query, #query *";
  const SHAPES = "rect, circle, ellipse, polygon, path, line, text, tspan";
  const CLEAR = ["rgba(0, 0, 0, 0)", "transparent", "none"];
  const FORMS = { date: "YYYY-MM-DD", time: "HH:MM", number: "a number" };  // of fields that drop any other text
  const LONGEST_TEXT = 80, LONGEST_PROSE = 1000, MOST_LINES = 60, ROW_PIXELS = 8, QUIET_MS = 20, SETTLED_MS = 500, READY_MS = 5000;
  const NO_TIME_LIMIT_MS = 1e9;  // of the page's own clock: how long a policy takes says nothing
  let listed = [], pointed = null;

  const pause = (ms) => new Promise((resolve) => setTimeout(resolve, ms));
  const tidy = (text) => text.replace(/\s+/g, " ").trim();
  const cut = (text, longest = LONGEST_TEXT) => text.length > longest ? `${text.slice(0, longest)}…` : text;
  const quoted = (text, longest) => JSON.stringify(cut(tidy(text), longest));

  // Waits until the page has not changed for a moment, at most SETTLED_MS.
  function settled() {
    return new Promise((resolve) => {
      let quiet = setTimeout(end, QUIET_MS);
      const observer = new MutationObserver(() => { clearTimeout(quiet); quiet = setTimeout(end, QUIET_MS); });
      const last = setTimeout(end, SETTLED_MS);
      observer.observe(document, { subtree: true, childList: true, attributes: true, characterData: true });
      function end() {
        observer.disconnect();
        clearTimeout(quiet);
        clearTimeout(last);
        resolve();
      }
    });
  }

  // ---------------------------------------------------------------- what is seen

  // Whether the middle of an element lies within the window and all boxes that it can be scrolled in.
  function inView(element, box) {
    const x = box.left + box.width / 2, y = box.top + box.height / 2;
    if (x < 0 || y < 0 || x > innerWidth || y > innerHeight) return false;
    for (let outer = element.parentElement; outer && outer !== document.body; outer = outer.parentElement) {
      if (getComputedStyle(outer).overflowY === "visible") continue;
      const frame = outer.getBoundingClientRect();
      if (y < frame.top || y > frame.bottom) return false;
    }
    return true;
  }

  function ownText(element) {
    return [...element.childNodes].filter((node) => node.nodeType === Node.TEXT_NODE).map((node) => node.data).join(" ");
  }

  function color(element) {
    const style = getComputedStyle(element);
    return element instanceof SVGElement ? (style.fill === "none" ? style.stroke : style.fill) : style.backgroundColor;
  }

  // The line of an element without its number; "" for one that is not shown.
  function line(element) {
    const tag = element.tagName.toLowerCase();
    if (tag === "input" && ["checkbox", "radio"].includes(element.type)) {
      const label = element.labels && element.labels[0] ? element.labels[0].textContent : "";
      return `${element.type} ${quoted(label)} ${element.checked ? "on" : "off"}`;
    }
    if (tag === "input" && ["button", "submit"].includes(element.type)) return `button ${quoted(element.value)}`;
    if (tag === "input" || tag === "textarea") {
      const hint = !element.value && element.placeholder ? ` (${cut(tidy(element.placeholder))})` : "";
      return `${tag} ${quoted(element.value, tag === "textarea" ? LONGEST_PROSE : LONGEST_TEXT)}${hint}`;
    }
    if (tag === "select" && element.size < 2 && !element.multiple) {
      const options = cut([...element.options].map((option) => tidy(option.text)).join("|"), 4 * LONGEST_TEXT);
      return `select ${quoted(element.selectedOptions[0] ? element.selectedOptions[0].text : "")} of ${options}`;
    }
    if (tag === "select" || (tag === "label" && element.control)) return "";
    if (element.matches(CONTROLS)) return `${tag} ${quoted(element.textContent)}`;
    const text = tidy(ownText(element)), style = getComputedStyle(element);
    if (text) return `${tag} ${quoted(text, tag === "p" ? LONGEST_PROSE : LONGEST_TEXT)}`;
    const image = [style.content, style.backgroundImage].map((one) => /^url\(.*?([^/]+)\.\w+"?\)/.exec(one)).find(Boolean);
    if (image) return `${tag} ${quoted((/\bui-icon-([\w-]+)/.exec(element.className) || image)[1])}`;  // else all of one picture
    if (!element.matches(SHAPES) && element.firstElementChild) return "";
    if (!CLEAR.includes(color(element))) return `${tag} ${color(element).replace(/, /g, ",")}`;
    return element.matches("div, span, td") && style.borderTopWidth !== "0px" ? `${tag} ""` : "";
  }

  // {goal, lines, done, reward}; elements are numbered as they are read, row by row.
  function told() {
    const found = [];
    for (const element of document.body.querySelectorAll("*")) {
      if (element.matches(LEFT_OUT) || !element.checkVisibility({ visibilityProperty: true, opacityProperty: true })) continue;
      const within = element.parentElement.closest("a, button");
      const box = element.getBoundingClientRect();
      if (within || !box.width || !box.height || !inView(element, box)) continue;
      const said = line(element);
      if (said) found.push({ element, said, row: Math.round((box.top + box.height / 2) / ROW_PIXELS), left: box.left });
    }
    found.sort((one, other) => one.row - other.row || one.left - other.left);
    listed = found.slice(0, MOST_LINES).map((one) => one.element);
    const lines = found.slice(0, MOST_LINES).map((one, at) => `${at + 1} ${one.said}`);
    if (found.length > MOST_LINES) lines.push(`${found.length - MOST_LINES} more are not listed`);
    return { goal: ((said) => said.utterance || said)(core.getUtterance()), lines, done: WOB_DONE_GLOBAL, reward: WOB_RAW_REWARD_GLOBAL };
  }

  // ---------------------------------------------------------------- what is done

  function fire(element, constructor, kind, more) {
    const box = element.getBoundingClientRect();
    const at = { clientX: box.left + box.width / 2, clientY: box.top + box.height / 2, view: window };
    element.dispatchEvent(new constructor(kind, { bubbles: true, cancelable: true, composed: true, ...at, ...more }));
  }

  function changed(element) {
    for (const kind of ["input", "change"]) element.dispatchEvent(new Event(kind, { bubbles: true }));
  }

  function click(element) {
    if (element.tagName === "OPTION") {
      element.selected = !(element.parentElement.multiple && element.selected);
      changed(element.closest("select"));
    }
    if (pointed) fire(pointed, MouseEvent, "mouseout");
    pointed = element;
    for (const kind of ["mouseover", "mousemove", "mousedown"]) fire(element, MouseEvent, kind);
    if (element.focus) element.focus();
    fire(element, MouseEvent, "mouseup");
    if (element.click) element.click();
    else fire(element, MouseEvent, "click");
  }

  // Puts text in the place of what an element holds. Returns what is wrong, or "".
  function type(element, text) {
    const tag = element.tagName;
    if (element.readOnly || element.disabled) return "Text cannot be typed there.";
    if (tag === "SELECT") {
      const option = [...element.options].find((one) => tidy(one.text) === text);
      if (!option) return `There is no option ${JSON.stringify(text)}.`;
      element.value = option.value;
    } else if (element.isContentEditable) {
      element.textContent = text;
    } else if ((tag === "INPUT" && !["checkbox", "radio", "button", "submit"].includes(element.type)) || tag === "TEXTAREA") {
      element.focus();
      element.value = text;
      if (text && !element.value) return `It takes ${FORMS[element.type] || "other text"}.`;
    } else return "Text cannot be typed there.";
    const key = { key: text.slice(-1) };
    for (const kind of ["keydown", "keypress"]) fire(element, KeyboardEvent, kind, key);
    changed(element);
    fire(element, KeyboardEvent, "keyup", key);
    return "";
  }

  function scroll(down) {
    const boxes = [...document.querySelectorAll("body *")].filter((element) =>
      element.scrollHeight > element.clientHeight + 1 && /auto|scroll/.test(getComputedStyle(element).overflowY));
    for (const box of boxes.length ? boxes : [document.scrollingElement])
      box.scrollBy({ top: (down ? 0.8 : -0.8) * (box.clientHeight || innerHeight), behavior: "instant" });
  }

  // One action; returns what is seen then, and what was wrong with the action, "" if nothing was.
  async function act(kind, number, text) {
    const element = listed[number - 1];
    let wrong = "";
    if (kind === "scroll") scroll(text === "down");
    else if (!element || !element.isConnected) wrong = `There is no element ${number}.`;
    else if (kind === "type") wrong = type(element, text);
    else click(element);
    if (!WOB_DONE_GLOBAL) await settled();
    return { wrong, ...told() };
  }

  // Makes the page of a seed, in a document that is new or has ended another episode.
  async function start(seed) {
    if (document.readyState !== "complete") await new Promise((resolve) => addEventListener("load", () => setTimeout(resolve, 0)));
    for (const element of document.querySelectorAll("body *")) if (element.scrollTop) element.scrollTop = 0;
    if (pointed) fire(pointed, MouseEvent, "mouseout");
    pointed = null;
    document.activeElement.blur();
    if (window.jQuery) jQuery.fx.off = true;
    core.EPISODE_MAX_TIME = NO_TIME_LIMIT_MS;
    Math.seedrandom(seed);
    core.startEpisodeReal();
    for (let waited = 0; !WOB_TASK_READY && waited < READY_MS; waited += QUIET_MS) await pause(QUIET_MS);
    await settled();
    return told();
  }

  return { start, act };
})();
