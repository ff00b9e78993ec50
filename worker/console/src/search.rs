//! What sessions are looked for: the fields of a form, the parameters of `GET /v1/sessions`, and the filter of a batch.

use crate::api::query;
use chrono::{DateTime, NaiveDateTime, Utc};
use serde::Deserialize;
use serde_json::{Map, Value, json};

/// A search as its form has it. An empty field asks for nothing.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub(crate) struct Search {
    pub status: String,
    pub text: String,
    pub conversation: String,
    pub trigger: String,
    pub user: String,
    pub from: String,
    pub tool: String,
    pub error: String,
    pub agent: String,
    pub since: String,
    pub until: String,
    pub cost_over: String,
    pub steps_over: String,
}

/// How many of the fields every form shows; the others are behind “More filters”.
const PLAIN: usize = 4;

impl Search {
    /// Each field: its name in an address, its name in the API, and its value.
    fn fields(&self) -> [(&'static str, &'static str, &str); 13] {
        [
            ("status", "status", &self.status),
            ("text", "text", &self.text),
            ("conversation", "conversation_id", &self.conversation),
            ("trigger", "trigger_type", &self.trigger),
            ("user", "user", &self.user),
            ("from", "from", &self.from),
            ("tool", "tool", &self.tool),
            ("error", "error", &self.error),
            ("agent", "agent", &self.agent),
            ("since", "since", &self.since),
            ("until", "until", &self.until),
            ("cost_over", "cost_over", &self.cost_over),
            ("steps_over", "steps_over", &self.steps_over),
        ]
        .map(|(own, of_api, value)| (own, of_api, value.trim()))
    }

    fn field(&mut self, of_api: &str) -> Option<&mut String> {
        Some(match of_api {
            "status" => &mut self.status,
            "conversation_id" => &mut self.conversation,
            "trigger_type" => &mut self.trigger,
            "text" => &mut self.text,
            "user" => &mut self.user,
            "from" => &mut self.from,
            "tool" => &mut self.tool,
            "error" => &mut self.error,
            "agent" => &mut self.agent,
            "since" => &mut self.since,
            "until" => &mut self.until,
            "cost_over" => &mut self.cost_over,
            "steps_over" => &mut self.steps_over,
            _ => return None,
        })
    }

    /// The search that a batch was made from.
    pub fn of_filter(filter: &Value) -> Search {
        let mut search = Search::default();
        for (name, value) in filter.as_object().into_iter().flatten() {
            if let Some(field) = search.field(name) {
                *field = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
            }
        }
        search
    }

    /// The search that a form of this console sent.
    pub fn of_form(get: impl Fn(&'static str) -> String) -> Search {
        let mut search = Search::default();
        for (own, of_api, _) in Search::default().fields() {
            if let Some(field) = search.field(of_api) {
                *field = get(own);
            }
        }
        search
    }

    /// What was filled in, by its name in an address.
    pub fn filled(&self) -> Vec<(&'static str, String)> {
        let fields = self.fields().into_iter().filter(|(.., value)| !value.is_empty());
        fields.map(|(own, _, value)| (own, value.to_owned())).collect()
    }

    pub fn is_empty(&self) -> bool {
        self.filled().is_empty()
    }

    /// Whether a field behind “More filters” is filled in.
    pub fn has_more(&self) -> bool {
        self.fields().into_iter().skip(PLAIN).any(|(.., value)| !value.is_empty())
    }

    /// The query of a page of this console.
    pub fn link(&self, more: &[(&str, &str)]) -> String {
        let filled = self.filled();
        let own = filled.iter().map(|(name, value)| (*name, value.as_str()));
        query(&own.chain(more.iter().copied()).collect::<Vec<_>>())
    }

    /// The same search, for another status.
    #[must_use]
    pub fn with_status(&self, status: &str) -> Search {
        Search { status: status.to_owned(), ..self.clone() }
    }

    /// The same words, looked for in what was said: a person may have typed them where an id is asked for. `None`: they are
    /// looked for there already.
    pub fn in_what_was_said(&self) -> Option<Search> {
        let misplaced = !self.conversation.trim().is_empty() && self.text.trim().is_empty();
        misplaced.then(|| Search {
            text: self.conversation.clone(),
            conversation: String::new(),
            ..self.clone()
        })
    }

    /// Whether the index that is filled beside the steps was asked.
    pub fn looks_beside(&self) -> bool {
        self.has_more() || !self.text.trim().is_empty()
    }

    /// The query of the API.
    pub fn asked(&self, more: &[(&str, &str)]) -> String {
        let fields = self.fields().map(|(_, of_api, value)| (of_api, moment(of_api, value)));
        let own = fields.iter().map(|(name, value)| (*name, value.as_str()));
        query(&own.chain(more.iter().copied()).collect::<Vec<_>>())
    }

    /// The filter of a batch. A field that should be a number and is not stays a text, and the API says which field it is.
    pub fn filter(&self) -> Value {
        let mut filter = Map::new();
        for (_, of_api, value) in self.fields().into_iter().filter(|(.., value)| !value.is_empty()) {
            let value = match of_api {
                "cost_over" => value.parse::<f64>().map_or_else(|_| json!(value), |number| json!(number)),
                "steps_over" => value.parse::<i64>().map_or_else(|_| json!(value), |number| json!(number)),
                _ => json!(moment(of_api, value)),
            };
            filter.insert(of_api.to_owned(), value);
        }
        Value::Object(filter)
    }

    /// The time as the browser's own field has it.
    pub fn since_field(&self) -> String {
        field_of(&self.since)
    }

    pub fn until_field(&self) -> String {
        field_of(&self.until)
    }
}

/// A field for times has no time zone: it is UTC, as its label says.
fn moment(of_api: &str, value: &str) -> String {
    if !matches!(of_api, "since" | "until") {
        return value.to_owned();
    }
    let read = ["%Y-%m-%dT%H:%M", "%Y-%m-%dT%H:%M:%S"]
        .into_iter()
        .find_map(|form| NaiveDateTime::parse_from_str(value, form).ok());
    read.map_or_else(|| value.to_owned(), |at| at.format("%Y-%m-%dT%H:%M:%SZ").to_string())
}

fn field_of(value: &str) -> String {
    let read = value.parse::<DateTime<Utc>>();
    read.map_or_else(|_| value.to_owned(), |at| at.format("%Y-%m-%dT%H:%M").to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_search_is_a_link_a_query_and_a_filter() {
        let search = Search {
            status: "failed".into(),
            conversation: " desk ".into(),
            since: "2026-11-23T09:00".into(),
            cost_over: "0.5".into(),
            steps_over: "many".into(),
            ..Search::default()
        };
        assert_eq!(
            search.link(&[("cursor", "")]),
            "?status=failed&conversation=desk&since=2026-11-23T09%3A00&cost_over=0.5&steps_over=many"
        );
        assert_eq!(
            search.asked(&[("limit", "50")]),
            "?status=failed&conversation_id=desk&since=2026-11-23T09%3A00%3A00Z&cost_over=0.5&steps_over=many&limit=50"
        );
        let filter = json!({"status": "failed", "conversation_id": "desk", "since": "2026-11-23T09:00:00Z",
            "cost_over": 0.5, "steps_over": "many"});
        assert_eq!(search.filter(), filter);
        let again = Search::of_filter(&filter);
        assert_eq!((again.since_field(), again.conversation.as_str()), ("2026-11-23T09:00".into(), "desk"));
        assert_eq!(again.filter(), filter);
        let sent = Search::of_form(|name| if name == "trigger" { "chat".to_owned() } else { String::new() });
        assert_eq!(sent, Search { trigger: "chat".into(), ..Search::default() });
        assert!(search.has_more() && !sent.has_more() && !sent.is_empty() && Search::default().is_empty());
        let words =
            Search { conversation: "table for two".into(), trigger: "chat".into(), ..Search::default() };
        let said = words.in_what_was_said().unwrap();
        assert_eq!(said.link(&[]), "?text=table+for+two&trigger=chat");
        assert!(said.in_what_was_said().is_none() && said.looks_beside() && !said.has_more());
    }
}
