//! Values of the configuration as people see them: in `wakeful config print`, and in messages about what is wrong.

use super::tree::Value;

/// A value for an error message: one line, cut to 60 characters. `key` is its whole name.
pub(super) fn shown(key: &str, value: &Value) -> String {
    match value {
        // A URL with a user name may also hold a password.
        Value::Text(text) if text.contains("://") && text.contains('@') => "(not shown)".to_owned(),
        Value::Text(text) => {
            let text = without_path(key, text);
            if text.chars().count() > 60 {
                format!("{:?}…", text.chars().take(60).collect::<String>())
            } else {
                format!("{text:?}")
            }
        }
        Value::Number(text) | Value::Date(text) => text.clone(),
        Value::Bool(flag) => flag.to_string(),
        Value::List(_) => "[…]".to_owned(),
        Value::Table(_) => "{…}".to_owned(),
    }
}

/// Like [`shown`], with the items of lists.
pub(super) fn whole(key: &str, value: &Value) -> String {
    match value {
        Value::List(items) => {
            let items: Vec<String> = items.iter().map(|item| whole(key, &item.value)).collect();
            format!("[{}]", items.join(", "))
        }
        other => shown(key, other),
    }
}

/// A text without what follows the host of a URL: many services take their secret in the path or the query. The path of a provider's
/// `base_url` is not secret, and people want to see it.
fn without_path(key: &str, text: &str) -> String {
    let Some(at) = text.find("://") else { return text.to_owned() };
    let host = at + "://".len();
    let is_providers = key.starts_with("providers.") && key.ends_with(".base_url");
    let ends = |c: char| match is_providers {
        true => matches!(c, '?' | '#') || c.is_whitespace(),
        false => !(c.is_alphanumeric() || ".-_:[]".contains(c)),
    };
    let end = text[host..].find(ends).map_or(text.len(), |at| host + at);
    match text.split_at(end) {
        (all, "" | "/") => all.to_owned(),
        (begin, _) => format!("{}/…", begin.trim_end_matches('/')),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_a_url_the_path_and_the_query_are_not_shown() {
        for (key, text, expected) in [
            ("mcp.x.url", "https://mcp.example/sse?key=hunter2", "https://mcp.example/…"),
            ("notify.url", "https://hooks.example:8443/services/hunter2", "https://hooks.example:8443/…"),
            ("notify.url", "https://hooks.example?hunter2", "https://hooks.example/…"),
            ("notify.url", "http://[::1]:80/hunter2", "http://[::1]:80/…"),
            ("blobs.store", "s3://bucket/hunter2", "s3://bucket/…"),
            ("mcp.x.command", "--url=https://mcp.example/hunter2", "--url=https://mcp.example/…"),
            ("server.public_url", "https://ops.example", "https://ops.example"),
            ("server.public_url", "https://ops.example/", "https://ops.example"),
            ("providers.openai.base_url", "https://api.openai.com/v1", "https://api.openai.com/v1"),
            ("providers.openai.base_url", "https://a.example/v1?key=hunter2", "https://a.example/v1/…"),
            ("providers.openai.base_url", "https://a.example/v1/#hunter2", "https://a.example/v1/…"),
            ("messenger.slack.base_url", "https://slack.example/hunter2", "https://slack.example/…"),
            ("agents.a.model", "openai/gpt", "openai/gpt"),
        ] {
            assert_eq!(shown(key, &Value::Text(text.to_owned())), format!("{expected:?}"), "{key} {text}");
        }
        let with_user = Value::Text("https://u:hunter2@mcp.example/".to_owned());
        assert_eq!(shown("mcp.x.url", &with_user), "(not shown)");
    }
}
