//! Scenario texts with `{{variables}}`.

use serde::Deserialize;

/// Maximum number of characters of `{{user.short}}`.
const SHORT_CHARS: usize = 200;

/// A text whose variables were checked when its file was read.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(try_from = "String")]
pub struct Template {
    parts: Vec<Part>,
}

#[derive(Clone, Debug, PartialEq)]
enum Part {
    Literal(String),
    /// `{{user}}`
    User,
    /// `{{user.short}}`
    UserShort,
    /// `{{result}}`
    Result,
    /// `{{result.N}}`, from 1.
    ResultAt(usize),
}

/// The values of the variables.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Variables<'a> {
    /// The newest user text.
    pub user: &'a str,
    /// The contents of the tool results since then, oldest first.
    pub results: Vec<&'a str>,
}

impl TryFrom<String> for Template {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        let mut parts = Vec::new();
        let mut rest = text.as_str();
        while let Some((before, after)) = rest.split_once("{{") {
            let Some((name, after)) = after.split_once("}}") else {
                return Err("`{{` has no `}}` after it".into());
            };
            if !before.is_empty() {
                parts.push(Part::Literal(before.to_owned()));
            }
            parts.push(variable(name.trim())?);
            rest = after;
        }
        if !rest.is_empty() {
            parts.push(Part::Literal(rest.to_owned()));
        }
        Ok(Template { parts })
    }
}

fn variable(name: &str) -> Result<Part, String> {
    match name {
        "user" => return Ok(Part::User),
        "user.short" => return Ok(Part::UserShort),
        "result" => return Ok(Part::Result),
        _ => {}
    }
    match name.strip_prefix("result.").and_then(|number| number.parse().ok()) {
        Some(number) if number > 0 => Ok(Part::ResultAt(number)),
        _ => Err(format!(
            "unknown variable `{{{{{name}}}}}`, expected {{{{user}}}}, {{{{user.short}}}}, {{{{result}}}} or \
             {{{{result.N}}}} with N from 1"
        )),
    }
}

impl Template {
    /// Replaces the variables in one pass, so braces in their values have no meaning. A missing result
    /// becomes `(no result)`.
    pub fn render(&self, variables: &Variables<'_>) -> String {
        const NONE: &str = "(no result)";
        let mut text = String::new();
        for part in &self.parts {
            match part {
                Part::Literal(literal) => text.push_str(literal),
                Part::User => text.push_str(variables.user),
                Part::UserShort => match variables.user.char_indices().nth(SHORT_CHARS) {
                    Some((end, _)) => {
                        text.push_str(&variables.user[..end]);
                        text.push('…');
                    }
                    None => text.push_str(variables.user),
                },
                Part::Result => text.push_str(variables.results.last().unwrap_or(&NONE)),
                Part::ResultAt(number) => {
                    text.push_str(variables.results.get(number - 1).unwrap_or(&NONE));
                }
            }
        }
        text
    }

    /// Returns whether the text is always blank.
    pub fn is_empty(&self) -> bool {
        self.parts.iter().all(|part| match part {
            Part::Literal(literal) => literal.trim().is_empty(),
            Part::User | Part::UserShort | Part::Result | Part::ResultAt(_) => false,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn render(text: &str, user: &str, results: &[&str]) -> String {
        let template = Template::try_from(text.to_owned()).unwrap();
        template.render(&Variables { user, results: results.to_vec() })
    }

    #[test]
    fn variables_are_replaced() {
        assert_eq!(render("a {{user}} b", "U", &[]), "a U b");
        assert_eq!(render("{{ result }}|{{result.1}}|{{result.3}}", "", &["x", "y"]), "y|x|(no result)");
        assert_eq!(render("{{result}} } {", "", &[]), "(no result) } {");
    }

    #[test]
    fn what_a_variable_stands_for_is_not_expanded_again() {
        assert_eq!(render("{{user}}", "{{result}}", &["secret"]), "{{result}}");
    }

    #[test]
    fn a_short_user_text_is_cut_between_characters() {
        assert_eq!(render("{{user.short}}", "kurz", &[]), "kurz");
        assert_eq!(render("{{user.short}}", &"é".repeat(201), &[]), format!("{}…", "é".repeat(200)));
    }

    #[test]
    fn an_unknown_variable_is_an_error_that_names_the_known_ones() {
        for text in ["{{usr}}", "{{}}", "{{result.0}}", "{{result.x}}", "{{result.-1}}"] {
            let error = Template::try_from(text.to_owned()).unwrap_err();
            assert!(error.contains("expected {{user}}"), "{text}: {error}");
        }
        assert!(Template::try_from("{{user".to_owned()).unwrap_err().contains("}}"));
    }
}
