//! `[mcp.NAME]`: servers of the Model Context Protocol, whose tools agents may have.

use super::problem::Origin;
use super::read::Section;
use secrecy::SecretString;
use std::collections::BTreeMap;
use std::path::PathBuf;

/// One server.
#[derive(Clone, Debug)]
pub struct Mcp {
    /// Its name here. The names of its tools begin with it.
    pub name: String,
    /// How it is reached.
    pub reach: Reach,
    /// The file with the tools that `wakeful mcp pull` wrote.
    pub definitions: PathBuf,
}

/// How a server is reached.
#[derive(Clone, Debug)]
pub enum Reach {
    /// A program that each process starts and talks to by its standard input and output.
    Program {
        /// The program and its arguments.
        command: Vec<String>,
        /// Variables of this process that it gets too. It gets `PATH`, `HOME` and a few more, and nothing else.
        env: Vec<String>,
    },
    /// Streamable HTTP.
    Url {
        /// `https://…` or `http://…`
        url: String,
        /// Sent as `Authorization: Bearer …`.
        token: Option<SecretString>,
    },
}

/// Reads the sections.
pub(super) fn read(sections: Vec<(String, Origin, Section<'_>)>) -> BTreeMap<String, Mcp> {
    sections
        .into_iter()
        .filter_map(|(name, origin, section)| Some((name.clone(), server(name, &origin, section)?)))
        .collect()
}

fn server(name: String, origin: &Origin, mut section: Section<'_>) -> Option<Mcp> {
    let is_name = (1..=32).contains(&name.len())
        && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_' || byte == b'-');
    if !is_name {
        let text = format!("mcp.{name:?}: the name of a server is 1 to 32 letters, digits, `_` and `-`");
        section.problem(origin.clone(), text);
    }
    let command = section.list("command");
    let env = section.list("env");
    let url =
        section.text("url", "must be an http or https URL without a user name and a password", |text| {
            let url = url::Url::parse(text).ok()?;
            let is_plain = url.username().is_empty() && url.password().is_none();
            (is_plain && matches!(url.scheme(), "http" | "https") && url.has_host()).then(|| text.to_owned())
        });
    let token = section.secret("token", |text| {
        (!text.bytes().all(|byte| byte.is_ascii_graphic()))
            .then_some("must be letters, digits and signs, without blanks")
    });
    let definitions =
        section.path("definitions").unwrap_or_else(|| origin.beside(&format!("mcp/{name}.json")));
    let lacks = |section: &Section<'_>, text: &str| {
        section.problem(origin.clone(), format!("mcp.{name}: {text}"));
        None
    };
    let reach = match (command, url) {
        (Some(command), None) if command.first().is_none_or(String::is_empty) => {
            lacks(&section, "command must name a program")
        }
        (Some(_), None) if token.is_some() => {
            lacks(&section, "token is for a url; a program gets the variables that env names")
        }
        (Some(command), None) => Some(Reach::Program { command, env: env.unwrap_or_default() }),
        (None, Some(_)) if env.is_some() => lacks(&section, "env is for a command; a url has token"),
        (None, Some(url)) => Some(Reach::Url { url, token }),
        (Some(_), Some(_)) => lacks(&section, "command and url are both set: keep one"),
        (None, None) => lacks(&section, "set command, such as [\"uvx\", \"mcp-server-time\"], or url"),
    };
    section.finish();
    Some(Mcp { name, reach: reach?, definitions })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Config;

    fn load(text: &str) -> Result<Config, String> {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("wakeful.toml");
        std::fs::write(&file, text).unwrap();
        let env = [("WAKEFUL_MCP__CLOUD__TOKEN".to_owned(), "s3cret".to_owned())];
        Config::load(Some(&file), env.into_iter()).map_err(|error| error.to_string())
    }

    #[test]
    fn a_server_is_a_program_or_a_url() {
        let config = load(
            "[mcp.clock]\ncommand = [\"uvx\", \"mcp-server-time\"]\nenv = [\"TZ\"]\n\
             [mcp.cloud]\nurl = \"https://mcp.example.org/mcp\"\ndefinitions = \"tools.json\"\n",
        )
        .unwrap();
        let (clock, cloud) = (&config.mcp["clock"], &config.mcp["cloud"]);
        let Reach::Program { command, env } = &clock.reach else { panic!("{clock:?}") };
        assert_eq!((command.len(), env.as_slice()), (2, ["TZ".to_owned()].as_slice()));
        assert!(clock.definitions.ends_with("mcp/clock.json"), "{clock:?}");
        let Reach::Url { token: Some(_), .. } = &cloud.reach else { panic!("{cloud:?}") };
        assert!(cloud.definitions.is_absolute() && cloud.definitions.ends_with("tools.json"), "{cloud:?}");
        assert!(!format!("{config:?}").contains("s3cret"));
    }

    #[test]
    fn what_is_wrong_is_said() {
        for (text, said) in [
            ("command = []", "command must name a program"),
            ("command = [\"a\"]\nurl = \"http://x/\"", "command and url are both set"),
            ("command = [\"a\"]\ntoken = \"x\"", "token is for a url"),
            ("url = \"http://x/\"\nenv = [\"A\"]", "env is for a command"),
            ("url = \"ftp://x/\"", "must be an http or https URL"),
            ("url = \"http://a:b@x/\"", "must be an http or https URL"),
            ("url = \"http://x/\"\ntoken = \"a b\"", "without blanks (its value is not shown)"),
            ("", "set command"),
        ] {
            let error = load(&format!("[mcp.one]\n{text}\n")).unwrap_err();
            assert!(error.contains(said), "{text}: {error}");
        }
        let error = load("[mcp.\"a b\"]\nurl = \"http://x/\"\n").unwrap_err();
        assert!(error.contains("1 to 32 letters"), "{error}");
    }
}
