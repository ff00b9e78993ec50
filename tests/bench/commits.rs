//! Commits per second: the store's step commit, and a whole turn of the worker.

use crate::fixture::{self, Held, TEXT, USAGE};
use anyhow::Result;
use serde_json::json;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};
use wakeful_store::Store;
use wakeful_workflow::advance::{CallEnd, EndedCall, Generated, Performed, Transition, advance};
use wakeful_workflow::agent::AgentPolicy;
use wakeful_workflow::effect::Effect;
use wakeful_workflow::record::{FinishReason, Reply};
use wakeful_workflow::session::{CallOutcome, CallStatus, Session};

/// How one step is committed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shape {
    /// One commit of two messages.
    Step,
    /// As the step job does it with a pure tool that takes no time. A session that is alone in its process: the assistant's
    /// message and its ledger row before the tool runs, then the rest. One of several: all of it at once.
    Turn,
}

/// The steps of one round, and the time they took.
#[derive(Clone, Copy, Debug)]
pub struct Round {
    pub steps: u64,
    pub seconds: f64,
}

/// Commits on every session at once for `seconds`.
pub async fn round(store: &Store, held: &mut Vec<Held>, shape: Shape, seconds: f64) -> Result<Round> {
    let began = Instant::now();
    let end = began + Duration::from_secs_f64(seconds);
    let mut tasks = tokio::task::JoinSet::new();
    let alone = held.len() == 1;
    for mut one in held.drain(..) {
        let store = store.clone();
        tasks.spawn(async move {
            let mut steps = 0;
            while Instant::now() < end {
                step(&store, &mut one, shape, alone).await?;
                steps += 1;
            }
            anyhow::Ok((one, steps))
        });
    }
    let mut steps = 0;
    while let Some(done) = tasks.join_next().await {
        let (one, more) = done??;
        held.push(one);
        steps += more;
    }
    Ok(Round { steps, seconds: began.elapsed().as_secs_f64() })
}

/// Commits one step. `alone`: the process has no other session.
pub async fn step(store: &Store, held: &mut Held, shape: Shape, alone: bool) -> Result<()> {
    match shape {
        Shape::Step => {
            let transition = fixture::step(&held.session);
            held.commit(store, &transition).await?;
        }
        Shape::Turn => turn(store, held, alone).await?,
    }
    // A commit never reads the transcript, so a long round does not keep it.
    held.session.records.clear();
    Ok(())
}

/// A reply that asks for one pure tool, and the tool's result.
fn turn_of(session: &Session) -> (Transition, Performed) {
    let step_number = session.last_step_number + 1;
    let call_id = format!("call_turn_{step_number}");
    let replied = Performed::Replied(Generated {
        generation_id: format!("gen_0193e8d7c4e07c3fa1b2c3d4{step_number:08}").as_str().into(),
        attempt: 1,
        model: "scripted/bench".to_owned(),
        request_sha256: "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855".to_owned(),
        started_at: Some("2026-01-01T00:00:00.000000+00:00".to_owned()),
        repairs: 0,
        resumes: None,
        prefill_bytes: None,
        context_strategy: wakeful_workflow::strategy::Strategy::Full,
        rebase: None,
        reply: Reply::new(fixture::assistant_content(&call_id), FinishReason::ToolCalls, USAGE),
        effects: BTreeMap::from([("write_file".to_owned(), Effect::Pure)]),
    });
    let path = format!("notes-{:02}.txt", step_number % 10);
    let called = Performed::Called(vec![EndedCall {
        call: fixture::tool_call(&call_id),
        ending: CallEnd::Settled(
            CallStatus::Done,
            CallOutcome {
                content: TEXT.clone(),
                is_error: false,
                details: Some(
                    json!({ "type": "fileWritten", "path": path, "bytes": 2048, "sha256": "5d41402abc4b" }),
                ),
            },
        ),
    }]);
    (advance(session, replied, AgentPolicy::default()), called)
}

/// What a turn leaves, as one transition.
pub fn whole_turn(session: &Session) -> Result<Transition> {
    let (mut asked, called) = turn_of(session);
    let mut after = session.clone();
    after.apply(&asked);
    anyhow::ensure!(asked.join(advance(&after, called, AgentPolicy::default())), "they are of one step");
    Ok(asked)
}

async fn turn(store: &Store, held: &mut Held, alone: bool) -> Result<()> {
    if !alone {
        let turn = whole_turn(&held.session)?;
        return held.commit(store, &turn).await;
    }
    let (asked, called) = turn_of(&held.session);
    held.commit(store, &asked).await?;
    let results = advance(&held.session, called, AgentPolicy::default());
    held.commit(store, &results).await
}
