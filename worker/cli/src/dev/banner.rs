//! The text that `wakeful dev` prints when it is up.
use std::fmt;
use std::net::SocketAddr;

use wakeful_workflow::session::SessionStatus;

use super::Home;
use super::samples::{self, State};
use super::style::{Style, one_line};

/// Facts about a running `wakeful dev` that its user needs.
#[derive(Debug)]
pub struct Banner<'a> {
    pub listen: SocketAddr,
    /// The worker's pid.
    pub worker: Option<i32>,
    pub home: &'a Home,
    /// The model of the default agent, if there is one.
    pub model: Option<&'a str>,
    /// The database is the one of `DATABASE_URL`, not our own.
    pub given_database: bool,
    /// Destination of outgoing mail: a directory or a server.
    pub mail: &'a str,
    pub workspaces: &'a str,
    /// Requests need a bearer token.
    pub guarded: bool,
    /// The name that this program was started with.
    pub program: &'a str,
    /// The options that name its data directory, with a leading space.
    pub place: &'a str,
    pub samples: &'a [State],
    /// It stops by itself (`--once`).
    pub once: bool,
    /// The path below which the console is, if it is served.
    pub console: Option<&'a str>,
    pub style: Style,
}

impl fmt::Display for Banner<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let style = self.style;
        let url = format!("http://{}", self.listen);
        let row = |f: &mut fmt::Formatter<'_>, name: &str, text: &str| writeln!(f, "  {name:<12} {text}");
        writeln!(f, "\n{}\n", style.bold(&format!("Wakeful is up at {url}")))?;
        if let Some(base_path) = self.console {
            row(
                f,
                "Console",
                &format!("{url}{base_path}/console/ in a browser: talk to the agent, look, act"),
            )?;
        }
        match self.model {
            Some(model) if model.starts_with("scripted/") => {
                row(f, "Model", &format!("{model}, offline"))?;
                row(f, "", "a real one with ANTHROPIC_API_KEY or OPENAI_API_KEY")?;
            }
            Some(model) => row(f, "Model", model)?,
            None => row(f, "Model", "as the agents of the configuration say")?,
        }
        if self.given_database {
            row(f, "Database", "the one of DATABASE_URL, migrated; never emptied from here")?;
        } else {
            row(
                f,
                "Database",
                &format!("export DATABASE_URL=\"$({} dev{} url)\"", self.program, self.place),
            )?;
            row(f, "Data", &self.home.dir().display().to_string())?;
        }
        row(f, "Mail", self.mail)?;
        row(f, "Workspaces", self.workspaces)?;
        row(f, "Log", &self.home.log().display().to_string())?;
        self.samples(f)?;
        self.to_try(f, &url)?;
        self.to_kill(f)?;
        if self.once {
            return writeln!(f, "\nThis was --once: stopping. The data stays.");
        }
        writeln!(f, "\nCtrl-C ends it, or from elsewhere:\n  {} dev{} stop", self.program, self.place)?;
        writeln!(f, "The data stays; the next start goes on from there.")
    }
}

impl Banner<'_> {
    fn samples(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.samples.is_empty() {
            return Ok(());
        }
        let seen = if self.given_database { "" } else { " (with the DATABASE_URL above)" };
        writeln!(f, "\n{}, and how to see each{seen}", self.style.bold("Samples"))?;
        let width = Style::columns().min(120).saturating_sub(33).max(20);
        for state in self.samples {
            let status = format!("{:<15}", state.status.as_str());
            let status = match state.status {
                SessionStatus::Completed => self.style.green(&status),
                SessionStatus::WaitingInput
                | SessionStatus::Created
                | SessionStatus::Queued
                | SessionStatus::Running => self.style.yellow(&status),
                SessionStatus::NeedsAttention
                | SessionStatus::Failed
                | SessionStatus::Cancelled
                | SessionStatus::Archived
                | SessionStatus::Terminated => self.style.red(&status),
            };
            writeln!(f, "  {:<14} {status} {}", state.conversation, one_line(&state.last, width))?;
            writeln!(f, "    {} session show {}", self.program, state.session_id)?;
        }
        Ok(())
    }

    fn to_kill(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (Some(pid), false) = (self.worker, self.once) else { return Ok(()) };
        writeln!(f, "\n{}", self.style.bold("Kill the worker while it works: another one goes on"))?;
        if self.model.is_some_and(|model| model.starts_with("scripted/")) {
            writeln!(f, "  In the console's chat say \"{}\", and while it is written:", samples::REPORT)?;
        }
        writeln!(f, "  kill -9 {pid}")?;
        writeln!(f, "  The session's timeline shows what was lost and what was kept.")
    }

    fn to_try(&self, f: &mut fmt::Formatter<'_>, url: &str) -> fmt::Result {
        let token = if self.guarded { " -H \"Authorization: Bearer $WAKEFUL_TOKEN\" \\\n   " } else { "" };
        let colour = self.samples.iter().find(|state| state.conversation == samples::COLOUR.conversation);
        let (conversation, session, text, title) = match colour {
            Some(state) if state.status == SessionStatus::WaitingInput => (
                state.conversation,
                state.session_id.as_str(),
                samples::ANSWER,
                "Answer the question, and watch it go on",
            ),
            Some(state) => (
                state.conversation,
                state.session_id.as_str(),
                samples::CLOCK.text,
                "Say something, and watch the answer come",
            ),
            None => (
                "hello",
                "SESSION_ID",
                samples::NOTE.text,
                "Say something, and watch the session that the answer names",
            ),
        };
        // The text goes inside a shell's single quotes.
        let text = text.replace('\'', "’");
        writeln!(f, "\n{}", self.style.bold(title))?;
        // Break long commands here with a backslash: a line that the terminal wraps cannot be copied well.
        writeln!(f, "  curl{token} {url}/v1/chat/{conversation}/messages \\")?;
        writeln!(f, "    -d '{{\"text\": \"{text}\"}}'")?;
        writeln!(f, "  curl{token} -N \\")?;
        writeln!(f, "  {url}/v1/sessions/{session}/stream")
    }
}
