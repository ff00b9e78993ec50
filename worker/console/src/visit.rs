//! One request of a browser: who looks, in which theme, and what the last act left to say.

use crate::api::Api;
use crate::frame::Frame;
use crate::refusal::Refusal;
use crate::seal::random_word;
use crate::typed::Typed;
use crate::{Console, Outside};
use axum::extract::FromRequestParts;
use axum::http::header::{AUTHORIZATION, COOKIE, HOST, HeaderValue, ORIGIN};
use axum::http::request::Parts;
use axum::http::uri::Authority;
use axum::http::{HeaderMap, StatusCode};
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// Over TLS a browser takes a cookie of this name only from this very host.
const SECURE: &str = "__Host-wakeful";
/// On this machine there is no TLS.
const LOCAL: &str = "wakeful_local";
const NOTE: &str = "wakeful_note";
/// The header of a look that the page's script makes by the clock.
const AGAIN: &str = "x-look-again";
pub(crate) const THEME: &str = "wakeful_theme";
/// The space of a visitor without a login.
const SPACE: &str = "wakeful_space";
/// How long a login lasts.
const LOGIN_S: i64 = 12 * 3600;
/// What the forms of a server without logins carry.
const NO_LOGIN: &str = "this machine";

/// What the cookie of a login holds.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Login {
    pub token: String,
    /// The forms of this login carry a word that is made of this.
    pub id: String,
    /// Seconds since 1970.
    issued_at: i64,
    /// The space that the person looks at, if the token may name one.
    space: String,
}

impl Login {
    pub fn new(token: &str) -> Login {
        let (id, issued_at) = (random_word(), chrono::Utc::now().timestamp());
        Login { token: token.to_owned(), id, issued_at, space: String::new() }
    }

    fn lasts(&self, now: i64) -> bool {
        now < self.ends_at()
    }

    fn ends_at(&self) -> i64 {
        self.issued_at.saturating_add(LOGIN_S)
    }
}

/// What the next page says about the last act.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Note {
    pub said: String,
    pub went_well: bool,
    /// Words, and where they lead.
    #[serde(default)]
    pub next: Option<(String, String)>,
    /// The key of what was typed, if the form was refused.
    #[serde(default)]
    pub typed: Option<String>,
}

/// One request of a browser.
#[derive(Clone)]
pub(crate) struct Visit {
    pub console: Arc<Console>,
    pub api: Api,
    pub login: Option<Login>,
    pub note: Option<Note>,
    /// `light`, `dark`, or empty for the system's own.
    pub theme: &'static str,
    /// The path and query of this page, as the browser has them.
    pub here: String,
    /// The space that the page is about. Empty: no space was chosen.
    space: String,
    transport: Transport,
    /// The page looks again by itself.
    again: bool,
}

/// How the browser reaches the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Transport {
    Tls,
    ThisMachine,
    Bare,
}

impl<S: Send + Sync> FromRequestParts<S> for Visit {
    type Rejection = Refusal;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Visit, Refusal> {
        let visit = parts.extensions.get::<Visit>().cloned();
        visit.ok_or_else(|| Refusal::new(StatusCode::INTERNAL_SERVER_ERROR, "the page has no visitor"))
    }
}

impl Visit {
    pub fn of(console: &Arc<Console>, headers: &HeaderMap, path: &str, outside: Outside) -> Visit {
        let transport = transport(headers);
        let now = chrono::Utc::now().timestamp();
        let sealed = |name: &str| {
            let login: Option<Login> = cookie(headers, name).and_then(|text| console.seal.open(name, text));
            login.filter(|login| login.lasts(now) && !console.ended.has(&login.id))
        };
        let login: Option<Login> = sealed(SECURE).or_else(|| match transport {
            Transport::ThisMachine => sealed(LOCAL),
            Transport::Tls | Transport::Bare => None,
        });
        let note = cookie(headers, NOTE).and_then(|text| console.seal.open(NOTE, text));
        let mut api = Api::new(console, headers, outside);
        let space = match &login {
            Some(login) => {
                api = api.under(&login.token);
                login.space.clone()
            }
            None => {
                cookie(headers, SPACE).and_then(|text| console.seal.open(SPACE, text)).unwrap_or_default()
            }
        };
        if !space.is_empty() {
            api = api.in_space(&space);
        }
        Visit {
            console: Arc::clone(console),
            api,
            note,
            theme: theme(cookie(headers, THEME).unwrap_or_default()),
            here: format!("{}{path}", console.settings.base_path),
            transport,
            login,
            space,
            again: headers.contains_key(AGAIN),
        }
    }

    /// This visit, for a page that looks again by itself: then what others have just been told will do.
    #[must_use]
    pub fn again(mut self, frame: &Frame) -> Visit {
        if let (true, Some(me)) = (self.again, &frame.me) {
            self.api = self.api.sharing(me.reach());
        }
        self
    }

    /// Where the console's pages are, as the browser has it.
    pub fn base(&self) -> String {
        format!("{}{}", self.console.settings.base_path, crate::ROOT)
    }

    /// The word that the forms of this page carry. The space is in the cookie, which another tab may change meanwhile: a form acts
    /// in the space of its own page, or not at all.
    pub fn word(&self) -> String {
        self.console.seal.form_word(self.login_id(), self.space())
    }

    pub fn knows(&self, word: &str) -> bool {
        self.console.seal.knows(self.login_id(), self.space(), word)
    }

    /// Whether a form is of this visitor, whatever the space of its page was.
    pub fn knows_login(&self, word: &str) -> bool {
        self.console.seal.knows_login(self.login_id(), word)
    }

    fn space(&self) -> &str {
        if self.space.is_empty() { "default" } else { &self.space }
    }

    pub fn login_id(&self) -> &str {
        self.login.as_ref().map_or(NO_LOGIN, |login| &login.id)
    }

    /// The cookie of a new login.
    ///
    /// # Errors
    /// 403 if everybody on the way could read it.
    pub fn log_in(&self, login: &Login) -> Result<HeaderValue, Refusal> {
        let (name, more) = match self.transport {
            Transport::Tls => (SECURE, "; Secure"),
            Transport::ThisMachine => (LOCAL, ""),
            Transport::Bare => {
                let detail = "a token is typed in over https, or on the server's own machine (an SSH tunnel will do): \
                    on this connection everybody on the way could read it";
                return Err(Refusal::new(StatusCode::FORBIDDEN, detail));
            }
        };
        let sealed = self.console.seal.seal(name, login).unwrap_or_default();
        Ok(cookie_header(name, &sealed, "; HttpOnly; SameSite=Strict", more))
    }

    /// The cookie that keeps the space that the person looks at. Sealed, so that no other server of this host chooses it.
    ///
    /// # Errors
    /// Like [`Visit::log_in`].
    pub fn choose(&self, space: &str) -> Result<HeaderValue, Refusal> {
        match &self.login {
            Some(login) => self.log_in(&Login { space: space.to_owned(), ..login.clone() }),
            None => Ok(kept(SPACE, &self.console.seal.seal(SPACE, &space).unwrap_or_default())),
        }
    }

    /// Whether nothing in the request says who this is, and the server asks for it.
    pub fn is_stranger(&self, headers: &HeaderMap) -> bool {
        self.console.settings.token.is_some() && self.login.is_none() && !headers.contains_key(AUTHORIZATION)
    }

    /// Ends the login, so that a copy of its cookie does not work either. Returns the headers that remove the cookies from the
    /// browser.
    pub fn log_out(&self) -> [HeaderValue; 3] {
        if let Some(login) = &self.login {
            self.console.ended.end(&login.id, login.ends_at(), chrono::Utc::now().timestamp());
        }
        [(SECURE, "; Secure"), (LOCAL, ""), (SPACE, "")].map(|(name, more)| gone(name, more))
    }

    /// The cookie with what the next page says.
    pub fn leave_note(&self, note: Note) -> HeaderValue {
        let note = Note { said: note.said.chars().take(500).collect(), ..note };
        let sealed = self.console.seal.seal(NOTE, &note).unwrap_or_default();
        cookie_header(NOTE, &sealed, "; HttpOnly; SameSite=Strict; Max-Age=60", "")
    }

    /// What was typed into the form that the note is about.
    pub fn typed(&self) -> Option<Typed> {
        let key = self.note.as_ref()?.typed.as_ref()?;
        self.console.typed.take(key, self.login_id())
    }

    /// The cookie that forgets the note, once it was shown.
    pub fn note_was_read(&self) -> Option<HeaderValue> {
        self.note.as_ref().map(|_| gone(NOTE, ""))
    }
}

/// A cookie that is kept for a year and holds no secret.
pub(crate) fn kept(name: &str, value: &str) -> HeaderValue {
    cookie_header(name, value, "; HttpOnly; SameSite=Strict; Max-Age=31536000", "")
}

fn gone(name: &str, more: &str) -> HeaderValue {
    cookie_header(name, "", "; HttpOnly; SameSite=Strict; Max-Age=0", more)
}

fn cookie_header(name: &str, value: &str, rules: &str, more: &str) -> HeaderValue {
    HeaderValue::from_str(&format!("{name}={value}; Path=/{rules}{more}"))
        .unwrap_or_else(|_| HeaderValue::from_static("wakeful_note=; Path=/; Max-Age=0"))
}

fn theme(word: &str) -> &'static str {
    match word {
        "light" => "light",
        "dark" => "dark",
        _ => "",
    }
}

fn cookie<'a>(headers: &'a HeaderMap, name: &str) -> Option<&'a str> {
    let pairs = headers.get_all(COOKIE).iter().filter_map(|value| value.to_str().ok());
    pairs
        .flat_map(|pairs| pairs.split(';'))
        .filter_map(|pair| pair.trim().split_once('='))
        .find(|(own, _)| *own == name)
        .map(|(_, value)| value)
}

fn header<'a>(headers: &'a HeaderMap, name: &str) -> Option<&'a str> {
    headers.get(name).and_then(|value| value.to_str().ok())
}

fn transport(headers: &HeaderMap) -> Transport {
    // A browser says in `Origin` what it sees, whatever the proxy in between says.
    let by_origin = header(headers, ORIGIN.as_str()).is_some_and(|origin| origin.starts_with("https://"));
    let by_proxy = header(headers, "x-forwarded-proto").is_some_and(|proto| proto.starts_with("https"));
    if by_origin || by_proxy {
        return Transport::Tls;
    }
    let host = header(headers, HOST.as_str()).and_then(|host| host.parse::<Authority>().ok());
    let is_local = host.is_some_and(|host| {
        let host = host.host().trim_start_matches('[').trim_end_matches(']');
        host.eq_ignore_ascii_case("localhost")
            || host.parse::<std::net::IpAddr>().is_ok_and(|ip| ip.is_loopback())
    });
    if is_local { Transport::ThisMachine } else { Transport::Bare }
}

/// Whether a page of this console sent a form, by what the browser itself says.
pub(crate) fn is_of_this_site(headers: &HeaderMap) -> bool {
    if let Some(site) = header(headers, "sec-fetch-site") {
        return site == "same-origin";
    }
    let Some((_, from)) = header(headers, ORIGIN.as_str()).and_then(|origin| origin.split_once("://")) else {
        return false;
    };
    [HOST.as_str(), "x-forwarded-host"].iter().any(|name| header(headers, name) == Some(from))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(pairs: &[(&'static str, &str)]) -> HeaderMap {
        let pairs = pairs.iter();
        pairs.map(|(name, value)| (name.parse().unwrap(), value.parse().unwrap())).collect()
    }

    #[test]
    fn only_forms_of_this_site_are_taken() {
        let own = [("host", "127.0.0.1:7070"), ("origin", "http://127.0.0.1:7070")];
        assert!(is_of_this_site(&headers(&own)));
        for foreign in ["http://evil.example", "null", "http://127.0.0.1:7071", "https://evil.example:7070"] {
            assert!(
                !is_of_this_site(&headers(&[("host", "127.0.0.1:7070"), ("origin", foreign)])),
                "{foreign}"
            );
        }
        assert!(!is_of_this_site(&headers(&[("host", "127.0.0.1:7070")])));
        let behind = [("host", "wakeful:7070"), ("origin", "https://ops.example.org")];
        assert!(!is_of_this_site(&headers(&behind)));
        let told = [behind[0], behind[1], ("x-forwarded-host", "ops.example.org")];
        assert!(is_of_this_site(&headers(&told)));
        for (site, taken) in
            [("same-origin", true), ("same-site", false), ("cross-site", false), ("none", false)]
        {
            let said = [behind[0], behind[1], ("sec-fetch-site", site)];
            assert_eq!(is_of_this_site(&headers(&said)), taken, "{site}");
        }
    }

    #[test]
    fn a_token_is_taken_over_tls_or_on_this_machine() {
        for (pairs, expected) in [
            (&[("host", "127.0.0.1:7070")][..], Transport::ThisMachine),
            (&[("host", "[::1]:7070")], Transport::ThisMachine),
            (&[("host", "localhost")], Transport::ThisMachine),
            (&[("host", "ops.example.org")], Transport::Bare),
            (&[("host", "localhost.evil.example")], Transport::Bare),
            (&[("host", "ops.example.org"), ("x-forwarded-proto", "https")], Transport::Tls),
            (&[("host", "ops.example.org"), ("origin", "https://ops.example.org")], Transport::Tls),
            (&[], Transport::Bare),
        ] {
            assert_eq!(transport(&headers(pairs)), expected, "{pairs:?}");
        }
    }

    /// What the console makes of a login of this age, in seconds.
    fn visit(age: i64) -> Visit {
        let console = Arc::new(Console {
            api: axum::Router::new(),
            settings: crate::Settings {
                token: Some("a token of the tests".to_owned()),
                ..Default::default()
            },
            seal: crate::seal::Seal::new(Some("a token of the tests")),
            ended: crate::ended::Ended::default(),
            presses: crate::press::Presses::default(),
            recent: crate::recent::Recent::default(),
            typed: crate::typed::Kept::default(),
        });
        let mut login = Login::new("wkt_secret");
        login.issued_at -= age;
        let sealed = console.seal.seal(LOCAL, &login).unwrap();
        let sent = headers(&[("host", "localhost"), ("cookie", &format!("{LOCAL}={sealed}"))]);
        Visit::of(&console, &sent, "/console/", Outside::default())
    }

    #[test]
    fn a_login_ends_after_half_a_day_and_choosing_a_space_does_not_prolong_it() {
        assert!(visit(0).login.is_some() && !visit(0).is_stranger(&HeaderMap::new()));
        assert!(visit(LOGIN_S + 1).login.is_none() && visit(LOGIN_S + 1).is_stranger(&HeaderMap::new()));
        let old = visit(LOGIN_S - 60);
        let chosen = old.choose("acme").unwrap();
        let (pair, _) = chosen.to_str().unwrap().split_once(';').unwrap();
        assert!(!pair.contains("acme"), "{pair}");
        let sealed = pair.strip_prefix("wakeful_local=").unwrap();
        let kept: Login = old.console.seal.open(LOCAL, sealed).unwrap();
        let before = old.login.unwrap();
        assert_eq!((kept.space.as_str(), kept.issued_at, &kept.id), ("acme", before.issued_at, &before.id));
        // A login of an earlier build says no time.
        let timeless = old.console.seal.seal(LOCAL, &serde_json::json!({"token": "t", "id": "i"})).unwrap();
        assert!(old.console.seal.open::<Login>(LOCAL, &timeless).is_none());
    }

    #[test]
    fn a_cookie_is_found_among_others() {
        let sent = headers(&[("cookie", "a=1; wakeful_theme=dark;b=2")]);
        assert_eq!(cookie(&sent, THEME), Some("dark"));
        assert_eq!(cookie(&sent, "theme"), None);
    }
}
