//! The rival: pgbench with one hand-written autocommit statement that leaves the same rows as
//! [`fixture::step`] or [`commits::whole_turn`].
//!
//! The statement knows its case in advance. It has no fence that can miss, no list of unknown length, and no
//! tables that only some steps touch. A real commit takes longer, because it must handle every case and
//! because it uses another client.

use crate::commits::{self, Round, Shape};
use crate::fixture::{self, Database, USAGE};
use anyhow::{Context, Result, bail};
use sqlx::Connection;
use std::path::PathBuf;
use std::process::Stdio;
use tokio::process::Command;
use wakeful::internal::dev::Binaries;
use wakeful_store::Store;
use wakeful_workflow::advance::Transition;

const STATEMENT: &str = r#"
with s as (
    update conversation_sessions
    set last_message_number = last_message_number + 2,
        last_event_seq = last_event_seq + $events,
        to_message_number = last_message_number + 2,
        last_step_number = last_step_number + 1,
        total_turns = total_turns + 1,
        total_input_tokens = total_input_tokens + $input,
        total_output_tokens = total_output_tokens + $output,
        total_cached_tokens = total_cached_tokens + $cached,
        total_cost_micros = total_cost_micros + $micros,
        state = state || :state
    where session_id = 'sess_' || lpad((:client_id)::text, 32, '0')
    returning space_id, session_id, conversation_id, last_message_number, last_event_seq, last_step_number, wake_seq
), j as (
    update jobs
    set step_number = jobs.step_number + 1, stuck = 0, attempt = 1, last_error = null
    from s
    where jobs.session_id = s.session_id and jobs.kind = 'step' and jobs.lease is not null
    returning jobs.lease
), records as (
    insert into conversation_records
        (space_id, conversation_id, message_number, session_id, run_id, step_number, role, content, internal, details)
    select s.space_id, s.conversation_id, s.last_message_number - 2 + r.ordinal, s.session_id,
        'run_' || substr(s.session_id, 6), s.last_step_number, r.role, r.content::json, false, r.details::json
    from s, j, (values (1, 'assistant', :content_1, :details_1), (2, 'tool', :content_2, '{}'))
        as r (ordinal, role, content, details)
), events as (
    insert into session_events (space_id, session_id, seq, type, run_id, step_number, payload)
    select s.space_id, s.session_id, s.last_event_seq - $events + e.ordinal, e.type, 'run_' || substr(s.session_id, 6),
        s.last_step_number, e.payload::jsonb
    from s, j, (values $rows)
        as e (ordinal, type, payload)
), step as (
    insert into session_steps
        (space_id, session_id, step_number, run_id, from_message_number, to_message_number, finish_reason, input_tokens,
         output_tokens, cached_tokens, cache_write_tokens, cost_micros, executed_local_tool_count, attempt,
         event_seq, lease, worker_id, started_at)
    select s.space_id, s.session_id, s.last_step_number, 'run_' || substr(s.session_id, 6), s.last_message_number - 2,
        s.last_message_number, 'tool_calls', $input, $output, $cached, 0, $micros, 1, 1, s.last_event_seq, j.lease,
        'bench', clock_timestamp() - make_interval(secs => 0.5)
    from s, j
)$calls
select max(s.wake_seq) / (1 / count(*)) from s, j;
"#;

/// The ledger's row of the tool call of a turn.
const CALLS: &str = ", calls as (
    insert into tool_calls
        (space_id, session_id, call_id, run_id, step_number, message_number, name, args_sha256, effect, status,
         result_message_number, settled_at)
    select s.space_id, s.session_id, 'call_turn_' || s.last_step_number, 'run_' || substr(s.session_id, 6), s.last_step_number,
        s.last_message_number - 1, 'write_file', :args_sha256, 'pure', 'done', s.last_message_number, clock_timestamp()
    from s, j
)";

/// pgbench, ready to run.
pub struct Pgbench {
    program: PathBuf,
    url: String,
    step: Script,
    turn: Script,
}

/// A statement with its variables.
struct Script {
    variables: Vec<String>,
    file: tempfile::NamedTempFile,
}

impl Script {
    /// The statement that leaves the rows of `transition`.
    fn new(transition: &Transition) -> Result<Script> {
        let state = &transition.state_updates[0];
        let mut variables =
            vec![format!("state={}", serde_json::json!({ (state.key.as_str()): state.value }))];
        for (number, record) in (1..).zip(&transition.records) {
            variables.push(format!("content_{number}={}", serde_json::to_string(&record.content)?));
            variables.push(format!("details_{number}={}", serde_json::to_string(&record.details)?));
        }
        let mut rows = Vec::new();
        for (number, event) in (1..).zip(&transition.events) {
            let (kind, payload) = event.to_row();
            variables.push(format!("event_{number}={payload}"));
            rows.push(format!("({number}, '{kind}', :event_{number})"));
        }
        let opened = transition.calls_opened.first();
        variables.extend(opened.map(|call| format!("args_sha256={}", call.args_sha256)));
        let statement = STATEMENT
            .replace("$input", &USAGE.input_tokens.to_string())
            .replace("$output", &USAGE.output_tokens.to_string())
            .replace("$cached", &USAGE.cached_tokens.to_string())
            .replace("$micros", &USAGE.cost_micros.to_string())
            .replace("$events", &rows.len().to_string())
            .replace("$rows", &rows.join(", "))
            .replace("$calls", if opened.is_some() { CALLS } else { "" });
        let file = tempfile::NamedTempFile::new()?;
        std::fs::write(file.path(), statement)?;
        Ok(Script { variables, file })
    }
}

impl Pgbench {
    /// Creates the script, and one session per client. The session's id contains the client's number.
    pub async fn new(database: &Database, store: &Store, clients: usize) -> Result<Pgbench> {
        let held = fixture::hold_sessions(store, 0, clients).await?;
        let mut connection = database.connect().await?;
        for table in ["conversation_sessions", "jobs"] {
            let session = "'sess_' || lpad(substr(conversation_id, 7), 32, '0')";
            let rename = format!("update {table} set session_id = {session}");
            sqlx::query(sqlx::AssertSqlSafe(rename)).execute(&mut connection).await?;
        }
        connection.close().await?;

        let step = Script::new(&fixture::step(&held[0].session))?;
        let turn = Script::new(&commits::whole_turn(&held[0].session)?)?;
        Ok(Pgbench { program: program()?, url: database.url.clone(), step, turn })
    }

    /// At most as many clients as sessions were made.
    pub async fn round(&self, shape: Shape, clients: usize, seconds: f64) -> Result<Round> {
        let script = match shape {
            Shape::Step => &self.step,
            Shape::Turn => &self.turn,
        };
        let mut command = Command::new(&self.program);
        command
            .args(["-n", "-M", "prepared", "-j", &clients.min(2).to_string()])
            .args(["-c", &clients.to_string(), "-T", &seconds.ceil().to_string()])
            .arg("-f")
            .arg(script.file.path());
        for variable in &script.variables {
            command.args(["-D", variable]);
        }
        let output = command.arg(&self.url).stdin(Stdio::null()).kill_on_drop(true).output().await?;
        let said = String::from_utf8_lossy(&output.stdout);
        let number = |label: &str| {
            let rest = said.split_once(label)?.1;
            rest.split_whitespace().next()?.parse::<f64>().ok()
        };
        match (number("actually processed: "), number("tps = ")) {
            (Some(steps), Some(rate)) if output.status.success() && rate > 0.0 => {
                Ok(Round { steps: steps as u64, seconds: steps / rate })
            }
            _ => bail!("pgbench: {said}{}", String::from_utf8_lossy(&output.stderr)),
        }
    }
}

/// Looks in `PATH`, then next to the newest server.
fn program() -> Result<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let server = Binaries::find().map(|server| server.dir).ok();
    std::env::split_paths(&path)
        .chain(server)
        .map(|dir| dir.join("pgbench"))
        .find(|file| file.is_file())
        .context("pgbench was not found: it comes with the Postgres server")
}
