//! `[absurd]`: how tasks of Absurd become sessions.

use super::read::Section;
use std::collections::BTreeMap;
use wakeful_workflow::absurd::declared::{Declared, PATHS, parse};
use wakeful_workflow::absurd::shape::Shape;

#[derive(Clone, Debug, Default, PartialEq)]
pub struct Absurd {
    /// The agent of tasks whose section names none. `None`: the agent `default`.
    pub agent: Option<String>,
    /// By the task's name.
    pub tasks: BTreeMap<String, TaskSettings>,
}

/// `[absurd.tasks."NAME"]`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TaskSettings {
    pub agent: Option<String>,
    /// How its checkpoints are read. `None`: told by them.
    pub shape: Option<Shape>,
    /// Reads the messages of slim steps.
    pub records_sql: String,
}

impl Absurd {
    /// The settings of a task.
    pub fn task(&self, name: &str) -> TaskSettings {
        let own = self.tasks.get(name).cloned().unwrap_or_default();
        TaskSettings { agent: own.agent.or_else(|| self.agent.clone()), ..own }
    }
}

fn agent(section: &mut Section<'_>) -> Option<String> {
    section.text("agent", "must be the name of an agent", |name| (!name.is_empty()).then(|| name.to_owned()))
}

/// Reads the section.
pub(super) fn read(mut section: Section<'_>) -> Absurd {
    let mut absurd = Absurd { agent: agent(&mut section), tasks: BTreeMap::new() };
    for (name, origin, mut section) in section.sections("tasks") {
        let agent = agent(&mut section);
        let built_in = section.text("shape", "must be agent-loop, new-messages or messages", Shape::built_in);
        let steps = section.list("steps").unwrap_or_default();
        let mut paths = BTreeMap::new();
        for (key, _) in PATHS {
            let path = section.text(key, "must be a JSONPath (RFC 9535), such as $.messages[*]", |path| {
                parse(path).is_ok().then(|| path.to_owned())
            });
            if let Some(path) = path {
                paths.insert(key.to_owned(), path);
            }
        }
        let records_sql = section
            .text("records_sql", "must be one select", |sql| {
                let sql = sql.trim().trim_end_matches(';');
                (sql.to_ascii_lowercase().starts_with("select") && !sql.contains(';')).then(|| sql.to_owned())
            })
            .unwrap_or_default();
        let shape = if steps.is_empty() {
            built_in
        } else {
            match Declared::new(steps, &paths) {
                Ok(declared) if paths.contains_key("messages") && built_in.is_none() => {
                    Some(Shape::Declared(Box::new(declared)))
                }
                Ok(_) => {
                    let text = format!(
                        "{}: `steps` needs `messages`, and no `shape` beside it",
                        section.full("steps")
                    );
                    section.problem(origin, text);
                    None
                }
                Err(_) => None,
            }
        };
        section.finish();
        absurd.tasks.insert(name, TaskSettings { agent, shape, records_sql });
    }
    section.finish();
    absurd
}
