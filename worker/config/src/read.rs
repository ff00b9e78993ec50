//! Reads a section key by key. The keys that the code asks for are the schema; any key left over is unknown.

use std::cell::RefCell;
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::time::Duration;

use secrecy::SecretString;
use wakeful_workflow::access::is_space;
use wakeful_workflow::policy::PARTICIPANTS;

use super::address::is_address;
use super::price::{USD_RULE, parse_usd};
use super::problem::{Origin, Problem};
use super::routes::Route;
use super::shown::{shown, whole};
use super::tree::{Node, Table, Value};
use super::{CloneFrom, Given};

/// How similar an unknown key must be to a known one to be suggested.
const NEAR: f64 = 0.75;

/// What reading finds besides the values.
#[derive(Default)]
pub(super) struct Notes {
    pub problems: RefCell<Vec<Problem>>,
    pub given: RefCell<Vec<Given>>,
    /// Checked when all agents are known.
    pub routes: RefCell<Vec<Route>>,
}

/// One table of the settings. Each getter removes its key; [`Section::finish`] reports the keys that are
/// left.
///
/// A getter that finds an unusable value reports it and returns as if the key were missing, so that one load
/// reports every problem.
pub(super) struct Section<'p> {
    path: String,
    table: Table,
    known: Vec<String>,
    notes: &'p Notes,
}

impl<'p> Section<'p> {
    pub fn root(table: Table, notes: &'p Notes) -> Self {
        Section { path: String::new(), table, known: Vec::new(), notes }
    }

    /// The table `key`; empty if it is missing.
    pub fn section(&mut self, key: &str) -> Section<'p> {
        let path = self.full(key);
        let table = match self.take(key) {
            None => Table::new(),
            Some(node) => self.table_of(&path, node),
        };
        Section { path, table, known: Vec::new(), notes: self.notes }
    }

    /// The tables inside `key`, whose keys are names, each with the place where it begins.
    pub fn sections(&mut self, key: &str) -> Vec<(String, Origin, Section<'p>)> {
        let outer = self.section(key);
        let mut sections = Vec::new();
        for (name, node) in outer.table {
            let path = format!("{}.{}", outer.path, quoted(&name));
            let origin = node.origin.clone();
            let table = self.table_of(&path, node);
            sections.push((name, origin, Section { path, table, known: Vec::new(), notes: self.notes }));
        }
        sections
    }

    /// The tables of the array `key`, each with the place where it begins.
    pub fn tables(&mut self, key: &str) -> Vec<(Origin, Section<'p>)> {
        let path = self.full(key);
        let Some(node) = self.take(key) else { return Vec::new() };
        let Value::List(items) = node.value else {
            self.problem(node.origin, format!("{path} must be written as [[{path}]]"));
            return Vec::new();
        };
        let of = |node: Node| {
            let origin = node.origin.clone();
            let table = self.table_of(&path, node);
            (origin, Section { path: path.clone(), table, known: Vec::new(), notes: self.notes })
        };
        items.into_iter().map(of).collect()
    }

    fn table_of(&self, path: &str, node: Node) -> Table {
        match node.value {
            Value::Table(table) => table,
            Value::Text(_) | Value::Number(_) | Value::Bool(_) | Value::Date(_) | Value::List(_) => {
                self.problem(
                    node.origin,
                    format!("{path} must be a section of settings, not a single value"),
                );
                Table::new()
            }
        }
    }

    /// A text that `check` accepts. `rule` describes it for the error message.
    pub fn text<T>(&mut self, key: &str, rule: &str, check: impl Fn(&str) -> Option<T>) -> Option<T> {
        let node = self.take(key)?;
        match &node.value {
            Value::Text(text) => {
                let checked = check(text);
                if checked.is_none() {
                    self.broken(key, &node, rule);
                }
                checked
            }
            Value::Number(_) | Value::Bool(_) | Value::Date(_) | Value::List(_) | Value::Table(_) => {
                self.broken(key, &node, rule);
                None
            }
        }
    }

    /// A whole number within `range`.
    pub fn number(&mut self, key: &str, range: RangeInclusive<i64>) -> Option<i64> {
        let rule = format!("must be a whole number from {} to {}", range.start(), range.end());
        self.numeric(key, &rule, |text| text.parse().ok().filter(|number| range.contains(number)))
    }

    /// A length of time in seconds, with milliseconds as decimal places.
    pub fn seconds(&mut self, key: &str, range: RangeInclusive<Duration>) -> Option<Duration> {
        let (least, most) = (range.start().as_secs_f64(), range.end().as_secs_f64());
        let rule =
            format!("must be a number of seconds from {least} to {most} with at most 3 decimal places");
        self.numeric(key, &rule, |text| parse_seconds(text).filter(|length| range.contains(length)))
    }

    /// A boolean. The environment gives it as text.
    pub fn flag(&mut self, key: &str) -> Option<bool> {
        let node = self.take(key)?;
        let given = match &node.value {
            Value::Bool(given) => Some(*given),
            Value::Text(text) => text.parse().ok(),
            Value::Number(_) | Value::Date(_) | Value::List(_) | Value::Table(_) => None,
        };
        if given.is_none() {
            self.broken(key, &node, "must be true or false");
        }
        given
    }

    /// An amount of money, in billionths of a dollar.
    pub fn usd(&mut self, key: &str) -> Option<i64> {
        self.numeric(key, USD_RULE, parse_usd)
    }

    fn numeric<T>(&mut self, key: &str, rule: &str, parse: impl Fn(&str) -> Option<T>) -> Option<T> {
        let node = self.take(key)?;
        let parsed = match &node.value {
            Value::Number(text) => parse(text),
            // Values from the environment are always text.
            Value::Text(text) if node.origin.is_environment() => parse(text.trim()),
            Value::Text(_) | Value::Bool(_) | Value::Date(_) | Value::List(_) | Value::Table(_) => None,
        };
        if parsed.is_none() {
            self.broken(key, &node, rule);
        }
        parsed
    }

    /// A list of texts, separated by commas in the environment.
    pub fn list(&mut self, key: &str) -> Option<Vec<String>> {
        let node = self.take(key)?;
        let items = texts(&node);
        if items.is_none() {
            self.broken(key, &node, "must be a list of texts, such as [\"a\", \"b\"]");
        }
        items
    }

    /// A path. In a file it is relative to the file's folder, in the environment to the working folder.
    pub fn path(&mut self, key: &str) -> Option<PathBuf> {
        let node = self.take(key)?;
        let path = self.path_of(&node);
        if path.is_none() {
            self.broken(key, &node, "must be a path");
        }
        path
    }

    /// A URL of `http` or `https` without credentials, or else a path as [`Section::path`] reads it.
    pub fn path_or_url(&mut self, key: &str) -> Option<CloneFrom> {
        let node = self.take(key)?;
        let text = if let Value::Text(text) = &node.value { text.as_str() } else { "" };
        let from = if text.contains("://") {
            let url = url::Url::parse(text).ok().filter(|url| {
                matches!(url.scheme(), "http" | "https")
                    && url.username().is_empty()
                    && url.password().is_none()
            });
            url.map(|_| CloneFrom::Url(text.to_owned()))
        } else {
            self.path_of(&node).map(CloneFrom::Path)
        };
        if from.is_none() {
            self.broken(
                key,
                &node,
                "must be a path, or an http or https URL without a user name and a password",
            );
        }
        from
    }

    fn path_of(&self, node: &Node) -> Option<PathBuf> {
        let Value::Text(text) = &node.value else { return None };
        if text.is_empty() {
            return None;
        }
        Some(node.origin.beside(text))
    }

    /// A secret: `key` itself, or the contents of the file that `key_file` names, trimmed.
    ///
    /// If both are given, the stronger source wins; both in the same source is a problem. `check` returns the
    /// rule that the secret breaks. No problem ever shows the value.
    pub fn secret(
        &mut self,
        key: &str,
        check: impl Fn(&str) -> Option<&'static str>,
    ) -> Option<SecretString> {
        let (origin, text) = self.secret_text(key, |node| match &node.value {
            Value::Text(text) => Some(text.clone()),
            Value::Number(_) | Value::Bool(_) | Value::Date(_) | Value::List(_) | Value::Table(_) => None,
        })?;
        let rule = if text.is_empty() { Some("must not be empty") } else { check(&text) };
        if let Some(rule) = rule {
            self.problem(origin, format!("{} {rule} (its value is not shown)", self.full(key)));
            return None;
        }
        Some(SecretString::from(text))
    }

    /// Several secrets: a list, or a file with one per line.
    pub fn secrets(&mut self, key: &str) -> Vec<SecretString> {
        let origin = self.origin(key);
        let text = self.secret_text(key, |node| texts(node).map(|items| items.join("\n")));
        let text = text.map(|(_, text)| text).unwrap_or_default();
        if text.starts_with('[') {
            let text = format!(
                "{} must be a list; in a variable, secrets with commas between; in a file, one per line (its value is not \
                 shown)",
                self.full(key)
            );
            self.problem(origin.unwrap_or(Origin::Nowhere), text);
            return Vec::new();
        }
        text.lines().map(str::trim).filter(|line| !line.is_empty()).map(SecretString::from).collect()
    }

    fn secret_text(
        &mut self,
        key: &str,
        inline: impl Fn(&Node) -> Option<String>,
    ) -> Option<(Origin, String)> {
        let file_key = format!("{key}_file");
        let (mut plain, mut file) = (self.take(key), self.take(&file_key));
        let secret = self.full(key);
        for given in self.notes.given.borrow_mut().iter_mut().filter(|given| given.key == secret) {
            given.value = "(not shown)".to_owned();
        }
        if let (Some(a), Some(b)) = (&plain, &file) {
            match a.origin.rank().cmp(&b.origin.rank()) {
                std::cmp::Ordering::Less => plain = None,
                std::cmp::Ordering::Greater => file = None,
                std::cmp::Ordering::Equal => {
                    let text = format!(
                        "{} and {} ({}) are both set: keep one",
                        self.full(key),
                        self.full(&file_key),
                        b.origin
                    );
                    self.problem(a.origin.clone(), text);
                    return None;
                }
            }
        }
        if let Some(node) = plain {
            let text = inline(&node);
            if text.is_none() {
                let text = format!("{} must be text (its value is not shown)", self.full(key));
                self.problem(node.origin.clone(), text);
            }
            return Some((node.origin, text?.trim().to_owned()));
        }
        let node = file?;
        let Some(path) = self.path_of(&node) else {
            self.broken(&file_key, &node, "must be a path");
            return None;
        };
        match std::fs::read_to_string(&path) {
            Ok(text) => Some((node.origin, text.trim().to_owned())),
            Err(error) => {
                let text = format!("{}: cannot read {}: {error}", self.full(&file_key), path.display());
                self.problem(node.origin, text);
                None
            }
        }
    }

    /// Where `key` was written, for a rule that spans several keys. Call this before the getter removes the
    /// key.
    pub fn origin(&self, key: &str) -> Option<Origin> {
        self.table.get(key).map(|node| node.origin.clone())
    }

    /// Reports every key that no getter asked for.
    pub fn finish(self) {
        for (key, node) in &self.table {
            let name = self.full(key);
            let nearest = self
                .known
                .iter()
                .map(|known| (strsim::jaro_winkler(&key.to_ascii_lowercase(), known), known))
                .filter(|(likeness, _)| *likeness >= NEAR)
                .max_by(|a, b| a.0.total_cmp(&b.0));
            let hint = match nearest {
                Some((_, known)) => format!("did you mean {}?", self.full(known)),
                None => format!("known here: {}", self.known.join(", ")),
            };
            self.problem(node.origin.clone(), format!("unknown key {name}; {hint}"));
        }
    }

    fn take(&mut self, key: &str) -> Option<Node> {
        self.known.push(key.to_owned());
        let node = self.table.remove(key)?;
        let has_tables = matches!(&node.value, Value::List(items) if items.iter().any(|item| matches!(item.value, Value::Table(_))));
        if !matches!(node.value, Value::Table(_)) && !has_tables {
            let (key, origin) = (self.full(key), node.origin.to_string());
            let value = whole(&key, &node.value);
            self.notes.given.borrow_mut().push(Given { key, value, origin });
        }
        Some(node)
    }

    /// The full path of the key, as TOML writes it.
    pub fn full(&self, key: &str) -> String {
        if self.path.is_empty() { quoted(key) } else { format!("{}.{}", self.path, quoted(key)) }
    }

    pub fn problem(&self, origin: Origin, text: String) {
        self.notes.problems.borrow_mut().push(Problem::new(origin, text));
    }

    fn broken(&self, key: &str, node: &Node, rule: &str) {
        let key = self.full(key);
        let shown = shown(&key, &node.value);
        self.problem(node.origin.clone(), format!("{key} = {shown} {rule}"));
    }
}

fn texts(node: &Node) -> Option<Vec<String>> {
    match &node.value {
        Value::List(items) => items
            .iter()
            .map(|item| match &item.value {
                Value::Text(text) => Some(text.clone()),
                Value::Number(_) | Value::Bool(_) | Value::Date(_) | Value::List(_) | Value::Table(_) => None,
            })
            .collect(),
        Value::Text(text) if node.origin.is_environment() => {
            Some(text.split(',').map(str::trim).filter(|item| !item.is_empty()).map(str::to_owned).collect())
        }
        Value::Text(_) | Value::Number(_) | Value::Bool(_) | Value::Date(_) | Value::Table(_) => None,
    }
}

fn quoted(key: &str) -> String {
    let bare = !key.is_empty() && key.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_' || b == b'-');
    if bare { key.to_owned() } else { format!("{key:?}") }
}

/// Reads `30` or `0.6` exactly, to the millisecond.
fn parse_seconds(text: &str) -> Option<Duration> {
    let text = text.strip_prefix('+').unwrap_or(text);
    let (whole, fraction) = text.split_once('.').unwrap_or((text, "0"));
    let digits = |part: &str, most: usize| {
        (1..=most).contains(&part.len()) && part.bytes().all(|byte| byte.is_ascii_digit())
    };
    if !digits(whole, 6) || !digits(fraction, 3) {
        return None;
    }
    let ms = format!("{fraction:0<3}").parse::<u64>().ok()?;
    Some(Duration::from_secs(whole.parse().ok()?) + Duration::from_millis(ms))
}

/// The addresses that an agent may mail: addresses, `*@domain`, `participants` or `*`.
pub(super) fn recipients(section: &mut Section<'_>) -> Option<Vec<String>> {
    let origin = section.origin("recipients");
    let list = section.list("recipients")?;
    let fits = |one: &str| {
        matches!(one, "*" | PARTICIPANTS)
            || one.strip_prefix("*@").is_some_and(|domain| is_address(&format!("x@{domain}")))
            || is_address(one)
    };
    if let Some(wrong) = list.iter().find(|one| !fits(one))
        && let Some(origin) = origin
    {
        let key = section.full("recipients");
        let text =
            format!("{key} has {wrong:?}: it must be an address, *@domain, participants, or * for everybody");
        section.problem(origin, text);
    }
    Some(list)
}

/// The agent and the space of what comes in by this section. `outer`: the section around it, which may name the space.
pub(super) fn route(section: &mut Section<'_>, outer: Option<&Route>) -> (Option<String>, Option<String>) {
    let (agent_at, space_at) = (section.origin("agent"), section.origin("space"));
    let agent = section
        .text("agent", "must be the name of an agent", |text| (!text.is_empty()).then(|| text.to_owned()));
    let space = space(section).or_else(|| outer?.space.clone());
    let space_at = space_at.or_else(|| outer?.space_at.clone());
    let route = Route {
        section: section.path.clone(),
        agent: agent.clone(),
        space: space.clone(),
        agent_at,
        space_at,
    };
    check_later(section, route);
    (agent, space)
}

/// Has a route checked when all agents are known.
pub(super) fn check_later(section: &Section<'_>, route: Route) {
    section.notes.routes.borrow_mut().push(route);
}

/// The space of a section whose messages go to the default agent, and how to check that, if they do.
pub(super) fn space_of_default_agent(section: &mut Section<'_>) -> (Option<String>, Route) {
    let space_at = section.origin("space");
    let space = space(section);
    let route =
        Route { section: section.path.clone(), agent: None, space: space.clone(), agent_at: None, space_at };
    (space, route)
}

/// The space of what a section is about.
pub(super) fn space(section: &mut Section<'_>) -> Option<String> {
    let rule = "must be a space: 1 to 64 letters, digits, -, _ and .";
    section.text("space", rule, |name| is_space(name).then(|| name.to_owned()))
}

/// The spaces of an agent: at least one.
pub(super) fn spaces(section: &mut Section<'_>) -> Option<Vec<String>> {
    let origin = section.origin("spaces")?;
    let list = section.list("spaces")?;
    let key = section.full("spaces");
    if let Some(wrong) = list.iter().find(|one| !is_space(one)) {
        let text = format!("{key} has {wrong:?}: a space has 1 to 64 letters, digits, -, _ and .");
        section.problem(origin, text);
    } else if list.is_empty() {
        section.problem(
            origin,
            format!("{key} is empty: name at least one space, or leave it out for all of them"),
        );
    }
    Some(list)
}

/// Converts a number whose range already fits `T`.
pub(super) fn narrow<T: TryFrom<i64>>(given: Option<i64>, default: T) -> T {
    given.and_then(|number| T::try_from(number).ok()).unwrap_or(default)
}
