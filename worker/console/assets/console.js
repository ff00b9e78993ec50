// What makes the pages quicker to use. Every page reads and acts without it.
"use strict";
(() => {
  const body = document.body;
  document.documentElement.classList.add("scripted");
  let stopped = false;
  let loading = false;
  let again = false;
  let elsewhere = false;

  // A form is sent once, however often its button is pressed.
  document.addEventListener("submit", (event) => {
    const form = event.target;
    if (form.method === "dialog" || form.method === "get") return;
    if (form.dataset.sent) {
      event.preventDefault();
      return;
    }
    form.dataset.sent = "yes";
    // Not at once: a disabled button would not send its own value.
    setTimeout(() => form.querySelectorAll("button").forEach((button) => { button.disabled = true; }), 0);
  });
  // The browser may show a page again as it was left.
  window.addEventListener("pageshow", (event) => {
    if (event.persisted) location.reload();
  });

  // Loads the page again and puts its parts into this one, except a part in which somebody types.
  // Says whether something is new. A page in a hidden tab, or one that is stopped, asks for nothing.
  async function refresh(byClock = false) {
    if (stopped || document.hidden) return false;
    if (loading) {
      again = true;
      return false;
    }
    let changed = false;
    loading = true;
    try {
      const headers = { accept: "text/html", ...(byClock && { "x-look-again": "1" }) };
      const response = await fetch(location.href, { headers, credentials: "same-origin" });
      isAway(response.status >= 500 || response.status === 429);
      // Without a login the page is another one, or a refusal.
      hasEnded(elsewhere || response.redirected || (response.status >= 400 && response.status < 500 && response.status !== 429));
      if (!response.ok || response.redirected) return false;
      const fresh = new DOMParser().parseFromString(await response.text(), "text/html");
      // Another tab went to another space. Its news does not belong on this page.
      elsewhere = fresh.body.dataset.space !== body.dataset.space;
      hasEnded(elsewhere);
      if (elsewhere) return false;
      for (const part of document.querySelectorAll("[data-part]")) {
        const next = fresh.querySelector(`[data-part="${part.dataset.part}"]`);
        // Somebody types there, or has typed. What is only focused, such as a folded line that was clicked, does not keep a part from its news.
        if (!next || (part.contains(document.activeElement) && document.activeElement.matches("input, textarea, select"))) continue;
        if ([...part.querySelectorAll("input, textarea")].some((field) => field.value !== field.defaultValue || (field.value && "typed" in field.dataset))) continue;
        if (same(part, next)) continue;
        changed ||= still(part) !== still(next);
        swap(part, next);
      }
      document.title = fresh.title;
    } catch {
      // The next look finds it again.
      isAway(true);
    } finally {
      loading = false;
      if (again) {
        again = false;
        refresh();
      }
    }
    return changed;
  }

  // Says that the server is away, above all that can be pressed. Nothing on the page looks as if it went on.
  const away = document.querySelector("[data-away]");
  function isAway(yes) {
    away.hidden = !yes;
    document.documentElement.classList.toggle("is-away", yes);
  }

  // Says that what is shown is no longer kept up to date.
  const ended = document.querySelector("[data-ended]");
  function hasEnded(yes) {
    ended.hidden = !yes;
  }

  // The words of forms differ from page to page and say nothing.
  const plain = (part) => part.innerHTML.replace(/name="(word|press)" value="[^"]*"/g, "").replace(/ (open|disabled)=""/g, "")
    .replace(/<button type="button" class="quiet copy">.*?<\/button>/g, "");
  const same = (one, other) => plain(one) === plain(other);
  // "5 s ago" says nothing new a moment later.
  const still = (part) => plain(part).replace(/(<time[^>]*>)[^<]*/g, "$1");

  // Where a folded part is: in its message or row, which may move when others come or go.
  function place(one) {
    const home = one.closest("article[id], tr[id]") || one.closest("[data-part]");
    return `${home.id || home.dataset.part}/${[...home.querySelectorAll("details")].indexOf(one)}`;
  }

  // How the same element is found again when its part was swapped: by its id, its address, or its place among its like.
  function handle(part, one) {
    if (one.id) return () => document.getElementById(one.id);
    const like = one.tagName + (one.getAttribute("href") ? `[href="${CSS.escape(one.getAttribute("href"))}"]` : "");
    const at = [...part.querySelectorAll(like)].indexOf(one);
    return () => part.querySelectorAll(like)[at];
  }

  function swap(part, next) {
    const open = new Map([...part.querySelectorAll("details")].map((one) => [place(one), one.open]));
    const atEnd = window.innerHeight + window.scrollY > document.documentElement.scrollHeight - 160;
    const focused = part.contains(document.activeElement) ? handle(part, document.activeElement) : null;
    part.className = next.className;
    part.replaceChildren(...document.importNode(next, true).childNodes);
    part.querySelectorAll("details").forEach((one) => { if (open.get(place(one))) one.open = true; });
    copies(part);
    if (focused) (focused() || document.body).focus?.({ preventScroll: true });
    if (atEnd && part.dataset.part === "said") window.scrollTo(0, document.documentElement.scrollHeight);
  }

  // The journal of one session, as it grows.
  function follow(url) {
    const typing = document.querySelector("[data-typing]");
    let soon = 0;
    let later = 0;
    let source;
    const look = () => {
      clearTimeout(soon);
      soon = setTimeout(refresh, 120);
    };
    const kinds = ["message_received", "state_transition", "gen_complete", "tool_invoked", "tool_result", "gen_sent",
      "delivery_failed", "delivery_resent", "invocation_result", "attempt_failed", "session_steered", "effect_resolved",
      "tool_failed_uncertain", "llm_called", "gen_failed"];
    const start = () => {
      source = new EventSource(url);
      // The browser opens it again by itself, unless the answer was no stream: a proxy's 502, or the end of a login. What
      // happened meanwhile is in the page, so it is loaded too.
      source.addEventListener("error", (event) => {
        isAway(true);
        if (event.target.readyState !== EventSource.CLOSED) return;
        clearTimeout(later);
        later = setTimeout(() => {
          if (stopped || document.hidden || source !== event.target) return;
          start();
          refresh();
        }, 5000);
      });
      source.addEventListener("open", () => { if (!away.hidden) { isAway(false); look(); } });
      kinds.forEach((kind) => source.addEventListener(kind, look));
      source.addEventListener("gen_reset", () => { if (typing) { typing.textContent = ""; typing.hidden = true; } });
      source.addEventListener("gen_chunk", (event) => {
        if (!typing) return;
        typing.hidden = false;
        typing.append(JSON.parse(event.data).delta);
      });
      source.addEventListener("gen_complete", () => { if (typing) { typing.hidden = true; typing.textContent = ""; } });
    };
    const stop = () => { if (source) source.close(); };
    document.addEventListener("visibilitychange", () => {
      stop();
      if (!document.hidden && !stopped) { start(); refresh(); }
    });
    document.addEventListener("stopped", () => { stop(); if (!stopped) { start(); refresh(); } });
    if (!document.hidden) start();
  }

  // Looks again after so many seconds. While nothing happens and the person does nothing, the looks become rarer: up to four
  // times as far apart. So many pages that stay open cost the database little.
  function every(seconds) {
    let wait = seconds;
    let timer = 0;
    const next = () => {
      clearTimeout(timer);
      timer = setTimeout(() => look(), wait * 1000);
    };
    // What others have just been told will do for a look by the clock.
    const look = async (byClock = true) => {
      wait = await refresh(byClock) ? seconds : Math.min(wait * 1.5, seconds * 4);
      next();
    };
    const soon = () => {
      if (wait > seconds) {
        wait = seconds;
        next();
      }
    };
    next();
    ["keydown", "pointerdown", "pointermove", "scroll"].forEach((act) => document.addEventListener(act, soon, { passive: true }));
    document.addEventListener("visibilitychange", () => {
      wait = seconds;
      look(false);
    });
  }

  function toggleUpdates() {
    stopped = !stopped;
    document.documentElement.classList.toggle("stopped", stopped);
    document.querySelectorAll("[data-updates]").forEach((one) => { one.textContent = stopped ? "Resume updates" : "Pause updates"; });
    document.dispatchEvent(new Event("stopped"));
  }

  // What a person copies: ids and new tokens.
  function copies(within) {
    if (!navigator.clipboard) return;
    within.querySelectorAll("[data-copy]").forEach((one) => {
      const button = document.createElement("button");
      button.type = "button";
      button.className = "quiet copy";
      button.textContent = "Copy";
      button.addEventListener("click", async () => {
        await navigator.clipboard.writeText(one.dataset.copy);
        button.textContent = "Copied";
      });
      one.append(button);
    });
  }

  // An example is a link that loads the page with its text in the box. Here it fills the box, and the page stays.
  document.querySelectorAll("a[data-fill]").forEach((one) => {
    const button = document.createElement("button");
    button.type = "button";
    button.className = one.className;
    button.textContent = one.textContent;
    button.addEventListener("click", () => {
      const box = document.getElementById(one.dataset.fill);
      box.value = one.textContent;
      box.focus();
    });
    one.replaceWith(button);
  });

  // Keys.
  let before = "";
  const rows = () => [...document.querySelectorAll(".row-link")].filter((one) => one.offsetParent);
  function step(by) {
    const all = rows();
    if (!all.length) return;
    const at = all.indexOf(document.activeElement);
    const next = all[Math.min(Math.max(at + by, 0), all.length - 1)];
    next.focus();
    next.scrollIntoView({ block: "nearest" });
  }
  // The first that a person sees, and not one in a folded part.
  const first = (selector) => [...document.querySelectorAll(selector)]
    .find((one) => one.offsetParent && !one.closest("details:not([open]) > :not(summary)"));
  document.addEventListener("keydown", (event) => {
    const field = event.target.closest("input, textarea, select");
    if (field && field.matches("[data-send]") && event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      if (field.value.trim()) field.form.requestSubmit();
      return;
    }
    if (field || event.ctrlKey || event.metaKey || event.altKey) return;
    if (before === "g") {
      before = "";
      const link = document.querySelector(`[data-key="g${event.key}"]`);
      if (link) link.click();
      return;
    }
    before = "";
    if (event.key === "g") before = "g";
    else if (event.key === "j") step(1);
    else if (event.key === "k") step(-1);
    else if (event.key === "a") {
      const act = first("main form[method=post] button:not([type=button], [disabled])");
      if (act) act.focus();
    }
    else if (event.key === "p" && (body.dataset.live || body.dataset.refresh)) toggleUpdates();
    else if (event.key === "?") document.getElementById("keys").showModal();
    else if (event.key === "/") {
      const field = first("main input:not([type=hidden], [type=radio], [type=checkbox]), main textarea");
      if (field) { event.preventDefault(); field.focus(); }
    }
  });

  document.querySelectorAll("[data-updates]").forEach((one) => {
    one.hidden = false;
    one.addEventListener("click", toggleUpdates);
  });
  copies(document);
  // Without a choice the system's theme is shown, which only the browser knows.
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  const theme = document.querySelector("[data-theme-switch]");
  if (theme && !document.documentElement.dataset.theme && dark) {
    theme.textContent = "Light theme";
    theme.form.elements.theme.value = "light";
  }
  if (body.dataset.live) follow(body.dataset.live);
  if (body.dataset.refresh) every(Number(body.dataset.refresh));
  const field = document.querySelector("[data-send]");
  if (field && location.hash === "#say") field.focus();
})();
