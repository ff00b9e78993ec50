//! What all pages share: the head, the navigation, who looks, and what the last act left to say.

use crate::assets;
use crate::recent::Reach;
use crate::refusal::Refusal;
use crate::seal::random_word;
use crate::visit::{Note, Visit};
use axum::http::StatusCode;
use axum::response::{Html, IntoResponse, Response};
use serde::Deserialize;

/// Who looks: `GET /v1/me`.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Me {
    pub who: String,
    pub name: Option<String>,
    pub scope: String,
    pub space_id: String,
    pub everywhere: bool,
    pub agent: Option<String>,
}

impl Me {
    pub fn shown(&self) -> &str {
        match (self.who.as_str(), &self.name) {
            (_, Some(name)) => name,
            ("machine", None) => "this machine",
            (_, None) => "the configured token",
        }
    }

    /// What the token lets its holder see.
    pub fn reach(&self) -> Reach {
        Reach {
            scope: self.scope.clone(),
            space_id: self.space_id.clone(),
            everywhere: self.everywhere,
            agent: self.agent.clone(),
        }
    }

    /// Whether forms that change something are shown at all.
    pub fn operates(&self) -> bool {
        self.scope != "read"
    }

    pub fn administers(&self) -> bool {
        self.scope == "admin" && self.everywhere && self.agent.is_none()
    }
}

/// A page of the navigation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Nav {
    Overview,
    Chat,
    Sessions,
    Errors,
    Effects,
    Batches,
    Deliveries,
    Notifications,
    Schedules,
    Queue,
    Mails,
    Audit,
    Tokens,
}

impl Nav {
    fn icon(self) -> &'static str {
        match self {
            Nav::Overview => "M4 13h6V4H4zM14 20h6v-9h-6zM4 20h6v-3H4zM14 7h6V4h-6z",
            Nav::Chat => "M4 5h16v11H9l-5 4z",
            Nav::Sessions => "M4 6h16M4 12h16M4 18h10",
            Nav::Errors => "M12 4l9 16H3zM12 10v4M12 17v.5",
            Nav::Effects => {
                "M12 21a9 9 0 1 0 0-18 9 9 0 0 0 0 18zM9.5 9.5a2.5 2.5 0 1 1 3.6 2.2c-.8.4-1.1.9-1.1 1.8M12 16.5v.5"
            }
            Nav::Batches => "M4 8l8-4 8 4-8 4zM4 12l8 4 8-4M4 16l8 4 8-4",
            Nav::Deliveries => "M21 3L10 14M21 3l-7 18-4-7-7-4z",
            Nav::Notifications => "M6 16v-5a6 6 0 0 1 12 0v5l2 2H4zM10 21h4",
            Nav::Schedules => "M12 21a9 9 0 1 0 0-18 9 9 0 0 0 0 18zM12 7v5l3 2",
            Nav::Mails => "M3 6h18v12H3zM3 7l9 6 9-6",
            Nav::Queue => "M5 20V10M12 20V4M19 20v-7",
            Nav::Audit => "M6 3h9l4 4v14H6zM9 12h7M9 16h7M14 3v5h5",
            Nav::Tokens => "M8 19a4.5 4.5 0 1 0 0-9 4.5 4.5 0 0 0 0 9zM11.2 11.3L20 4M16 7.2l3 3",
        }
    }
}

pub(crate) struct NavItem {
    pub name: &'static str,
    pub path: &'static str,
    pub key: &'static str,
    /// A path in an SVG of 24 by 24.
    pub icon: &'static str,
    pub is_here: bool,
    /// Begins a group.
    pub begins: bool,
}

/// What the base template needs.
pub(crate) struct Frame {
    pub title: String,
    pub base: String,
    pub style: &'static str,
    pub script: &'static str,
    pub icon: &'static str,
    pub theme: &'static str,
    pub other_theme: &'static str,
    pub note: Option<Note>,
    pub me: Option<Me>,
    pub nav: Vec<NavItem>,
    /// The word against forms of other sites, and that of this page's press.
    pub word: String,
    pub press: String,
    pub here: String,
    /// The stream whose entries make the page load its parts again.
    pub live: String,
    /// Seconds after which the page loads its parts again; 0: never.
    pub refresh_s: u32,
    pub version: &'static str,
    pub has_login: bool,
}

impl Frame {
    /// The frame of a page that the visitor may see.
    ///
    /// # Errors
    /// What the API says of the visitor's token.
    pub async fn of(visit: &Visit, nav: Nav, title: impl Into<String>) -> Result<Frame, Refusal> {
        let me: Me = visit.api.get("/v1/me").await?;
        if me.who == "user" {
            let detail = "a token of a user is for the application that asked for it; the console takes tokens of `wakeful token`";
            return Err(Refusal::new(StatusCode::FORBIDDEN, detail));
        }
        let mut frame = Frame::bare(visit, title);
        frame.nav = items(nav, &me);
        frame.me = Some(me);
        Ok(frame)
    }

    /// The frame of a page for strangers.
    pub fn bare(visit: &Visit, title: impl Into<String>) -> Frame {
        Frame {
            title: title.into(),
            base: visit.base(),
            style: assets::style(),
            script: assets::script(),
            icon: assets::icon(),
            theme: visit.theme,
            other_theme: if visit.theme == "dark" { "light" } else { "dark" },
            note: visit.note.clone(),
            me: None,
            nav: Vec::new(),
            word: visit.word(),
            press: random_word(),
            here: visit.here.clone(),
            live: String::new(),
            refresh_s: 0,
            version: env!("CARGO_PKG_VERSION"),
            has_login: visit.login.is_some(),
        }
    }

    pub fn operates(&self) -> bool {
        self.me.as_ref().is_some_and(Me::operates)
    }
}

fn items(here: Nav, me: &Me) -> Vec<NavItem> {
    let whole = me.everywhere && me.agent.is_none();
    let item = |nav: Nav, name, path, key, begins, is_open: bool| {
        is_open.then_some(NavItem { name, path, key, icon: nav.icon(), is_here: nav == here, begins })
    };
    [
        item(Nav::Overview, "Overview", "/", "o", false, true),
        item(Nav::Chat, "Chat", "/chat", "c", false, true),
        item(Nav::Sessions, "Sessions", "/sessions", "s", false, true),
        item(Nav::Errors, "Errors", "/errors", "r", false, me.agent.is_none()),
        item(Nav::Effects, "Uncertain effects", "/effects", "u", false, true),
        item(Nav::Batches, "Batches", "/batches", "b", false, me.agent.is_none()),
        item(Nav::Deliveries, "Deliveries", "/deliveries", "d", true, me.agent.is_none()),
        item(Nav::Notifications, "Notifications", "/notifications", "n", false, me.agent.is_none()),
        item(Nav::Schedules, "Schedules", "/schedules", "e", false, me.agent.is_none()),
        item(Nav::Mails, "Mails", "/mails", "m", false, me.agent.is_none()),
        item(Nav::Queue, "Queue and workers", "/queue", "q", true, whole),
        item(Nav::Audit, "Audit", "/audit", "a", false, me.administers()),
        item(Nav::Tokens, "Tokens", "/tokens", "t", false, me.administers()),
    ]
    .into_iter()
    .flatten()
    .collect()
}

/// A rendered template.
pub(crate) fn page(template: &impl askama::Template) -> Response {
    match template.render() {
        Ok(text) => Html(text).into_response(),
        Err(error) => Refusal::broken("the page's template", &error).into_response(),
    }
}
