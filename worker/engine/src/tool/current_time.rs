//! `current_time`: tells the current time, at an offset from UTC.

use super::{Tool, ToolCallContext, ToolError, ToolOutput, parse_arguments};
use async_trait::async_trait;
use chrono::{DateTime, FixedOffset, SecondsFormat, Utc};
use serde::Deserialize;
use serde_json::{Value, json};
use wakeful_workflow::agent::ToolDefinition;
use wakeful_workflow::effect::Effect;

/// Tells the time. The prompt holds no clock, so that equal contexts give equal requests; an agent asks this
/// tool instead.
pub struct CurrentTime;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Arguments {
    utc_offset: Option<String>,
}

#[async_trait]
impl Tool for CurrentTime {
    fn definition(&self) -> ToolDefinition {
        ToolDefinition::new(
            "current_time",
            "The current date and time in RFC 3339, in UTC or at a given offset from it, with the \
                          day of the week.",
            json!({
                "type": "object",
                "properties": {
                    "utc_offset": {
                        "type": "string",
                        "description": "Offset from UTC such as \"+02:00\" or \"-05:30\". Default: UTC. Names of \
                                        time zones are not understood.",
                    },
                },
                "additionalProperties": false,
            }),
            Effect::Pure,
        )
    }

    async fn call(&self, _: &ToolCallContext, arguments: Value) -> Result<ToolOutput, ToolError> {
        let Arguments { utc_offset } = parse_arguments(arguments)?;
        Ok(ToolOutput::text(render(Utc::now(), utc_offset.as_deref())?))
    }
}

fn render(now: DateTime<Utc>, utc_offset: Option<&str>) -> Result<String, ToolError> {
    let text = match utc_offset {
        None | Some("Z" | "") => {
            format!("{} ({})", now.to_rfc3339_opts(SecondsFormat::Secs, true), now.format("%A"))
        }
        Some(offset) => {
            let Some(offset) = parse_offset(offset) else {
                return Err(ToolError::new(
                    "The utc_offset is not of the form \"+02:00\" or \"-05:30\", between -14:00 and +14:00. Give \
                     it in that form, or leave it out for UTC.",
                ));
            };
            let local = now.with_timezone(&offset);
            format!("{} ({})", local.to_rfc3339_opts(SecondsFormat::Secs, false), local.format("%A"))
        }
    };
    Ok(text)
}

/// Reads exactly `±hh:mm`.
fn parse_offset(text: &str) -> Option<FixedOffset> {
    let (sign, rest) = match text.split_at_checked(1)? {
        ("+", rest) => (1, rest),
        ("-", rest) => (-1, rest),
        _ => return None,
    };
    let (hours, minutes) = rest.split_once(':')?;
    let two_digits = |part: &str| if part.len() == 2 { part.chars().try_fold(0, digit) } else { None };
    let (hours, minutes) = (two_digits(hours)?, two_digits(minutes)?);
    let total = hours * 60 + minutes;
    if minutes > 59 || total > 14 * 60 {
        return None;
    }
    FixedOffset::east_opt(sign * total * 60)
}

fn digit(number: i32, digit: char) -> Option<i32> {
    Some(number * 10 + i32::try_from(digit.to_digit(10)?).ok()?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tool::files::tests::context;
    use std::path::Path;

    fn moment() -> DateTime<Utc> {
        "2025-03-31T22:30:00Z".parse().unwrap()
    }

    #[test]
    fn utc_is_the_default() {
        assert_eq!(render(moment(), None).unwrap(), "2025-03-31T22:30:00Z (Monday)");
        assert_eq!(render(moment(), Some("Z")).unwrap(), "2025-03-31T22:30:00Z (Monday)");
    }

    #[test]
    fn an_offset_moves_the_clock_and_the_day() {
        assert_eq!(render(moment(), Some("+02:00")).unwrap(), "2025-04-01T00:30:00+02:00 (Tuesday)");
        assert_eq!(render(moment(), Some("-05:30")).unwrap(), "2025-03-31T17:00:00-05:30 (Monday)");
        assert_eq!(render(moment(), Some("+00:00")).unwrap(), "2025-03-31T22:30:00+00:00 (Monday)");
    }

    #[test]
    fn any_other_offset_is_refused_with_the_form() {
        for offset in [
            "2",
            "+2",
            "+02",
            "+0200",
            "02:00",
            "+2:00",
            "+02:60",
            "+15:00",
            "+14:01",
            "Europe/Berlin",
            "+-2:00",
            "++2:00",
            "é",
            "+٠٢:٠٠",
            "\0",
            "+02:00 ",
        ] {
            let error = render(moment(), Some(offset)).unwrap_err().to_string();
            assert!(error.contains("+02:00"), "{offset:?}: {error}");
        }
    }

    #[tokio::test]
    async fn the_time_is_now() {
        let output = CurrentTime.call(&context(Path::new("none"), false), json!({})).await.unwrap();
        let stamp = output.content.split(' ').next().unwrap();
        let told: DateTime<Utc> = stamp.parse().unwrap();
        assert!((Utc::now() - told).num_seconds().abs() < 5, "{stamp}");
    }
}
