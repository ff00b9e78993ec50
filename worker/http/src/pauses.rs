//! Pauses: what operators switch off for a while. See [`wakeful_workflow::pause`].

use crate::access::Caller;
use crate::body::{Body, REASON_BYTES, check_text, parse};
use crate::openapi::Operation;
use crate::openapi::of;
use crate::problem::Problem;
use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;
use wakeful_config::Config;
use wakeful_engine::ctx::Ctx;
use wakeful_store::outbox::DeliveryFilter;
use wakeful_store::pause::Pause;
use wakeful_store::session::SessionFilter;
use wakeful_store::space::{Scope, within};
use wakeful_store::{Error, Store};
use wakeful_workflow::access::Reach;
use wakeful_workflow::id::DEFAULT_SPACE;
use wakeful_workflow::pause::{Kind, LASTS_S, Subject};
use wakeful_workflow::trigger;

/// The fastest rate, in sessions a second.
const FASTEST: f64 = 1000.0;

/// How many known names a warning lists.
const SHOWN: usize = 20;

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "NewPause")]
struct BeginInput {
    #[schemars(extend("enum" = Kind::ALL.map(Kind::as_str)))]
    kind: String,
    name: Option<String>,
    reason: String,
    for_s: Option<u64>,
    rate: Option<f64>,
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "PauseEnd")]
struct EndInput {
    #[schemars(extend("enum" = Kind::ALL.map(Kind::as_str)))]
    kind: String,
    name: Option<String>,
    rate: Option<f64>,
}

/// Every pause. Only tokens of the whole installation may ask, so it counts what waits in all spaces.
pub(super) async fn list(State(ctx): State<Arc<Ctx>>) -> Result<Json<Value>, Problem> {
    Ok(Json(json!({"items": within(Scope::All, ctx.store.pauses()).await?})))
}

/// Pauses something, or changes its pause: 201.
pub(super) async fn begin(
    State(ctx): State<Arc<Ctx>>,
    caller: Caller,
    body: Body,
) -> Result<(StatusCode, Json<Paused>), Problem> {
    let asked: BeginInput = parse(&body?)?;
    let subject = Subject::named(kind(&asked.kind)?, asked.name.as_deref(), caller.space())
        .map_err(Problem::bad_request)?;
    if asked.reason.trim().is_empty() {
        return Err(Problem::bad_request("`reason` says why, for those who wait"));
    }
    check_text("reason", Some(&asked.reason), REASON_BYTES)?;
    if asked.for_s.is_some_and(|seconds| !LASTS_S.contains(&seconds)) {
        return Err(Problem::bad_request(format!("`for_s` is from 1 to {}", LASTS_S.end())));
    }
    let (lasts, rate) = (asked.for_s.map(Duration::from_secs), rate(asked.rate)?);
    let paused = async {
        let pause = ctx.store.pause(&subject, &asked.reason, lasts, rate).await?;
        let known = match subject.kind {
            Kind::Provider => ctx.plugins.models.providers().map(str::to_owned).collect(),
            Kind::Tool => ctx.plugins.tools.names().map(str::to_owned).collect(),
            Kind::Channel => ctx.plugins.channels.keys().cloned().collect(),
            _ => BTreeSet::new(),
        };
        let warning = unknown(&ctx.config, &ctx.store, &subject, known).await?;
        Ok::<_, Error>(Paused { pause, warning })
    };
    Ok((StatusCode::CREATED, Json(within(Scope::All, paused).await?)))
}

/// A pause that was made.
#[derive(Serialize, JsonSchema)]
pub(super) struct Paused {
    #[serde(flatten)]
    pause: Pause,
    /// Warns that nothing has had this name so far: it may be misspelt.
    #[serde(skip_serializing_if = "Option::is_none")]
    warning: Option<String>,
}

/// What to warn of: neither the program, nor its configuration, nor the database has anything with the name of what is paused.
/// `known`: the program's providers, tools or channels, for a pause of one of those.
///
/// It is a warning and not a refusal, because other processes may have what this one does not, and a pause may come before
/// what it holds.
///
/// # Errors
/// [`Error::Database`].
pub async fn unknown(
    config: &Config,
    store: &Store,
    subject: &Subject,
    known: BTreeSet<String>,
) -> Result<Option<String>, Error> {
    let name = subject.name.as_str();
    let of_sessions = SessionFilter { limit: 1, ..SessionFilter::default() };
    let mut names = known;
    let filter = match subject.kind {
        Kind::Queue => return Ok(None),
        Kind::Space => {
            names.insert(DEFAULT_SPACE.to_owned());
            names.extend(config.agents.values().flat_map(|agent| agent.spaces.clone().unwrap_or_default()));
            Some(SessionFilter { space_id: Some(name.to_owned()), ..of_sessions })
        }
        Kind::Agent => {
            names.extend(config.agent_names());
            let served =
                store.workers().await?.into_iter().flat_map(|worker| worker.agents.unwrap_or_default());
            names.extend(served.map(|one| one.rsplit('/').next().unwrap_or_default().to_owned()));
            Some(SessionFilter { agent: Some(name.to_owned()), ..of_sessions })
        }
        Kind::Trigger => {
            names.extend(trigger::OWN.map(str::to_owned));
            if store.knows_trigger_type(&Reach::default(), name).await? {
                names.insert(name.to_owned());
            }
            None
        }
        Kind::Provider => None,
        Kind::Tool => Some(SessionFilter { tool: Some(name.to_owned()), ..of_sessions }),
        Kind::Channel => {
            let filter =
                DeliveryFilter { channel: Some(name.to_owned()), limit: 1, ..DeliveryFilter::default() };
            if !store.outbox(&filter).await?.is_empty() {
                return Ok(None);
            }
            None
        }
        Kind::Conversation => Some(SessionFilter { conversation_id: Some(name.to_owned()), ..of_sessions }),
        Kind::Schedule => {
            let (space, own) = name.split_once('/').unwrap_or((DEFAULT_SPACE, name));
            match store.schedule(space, own).await {
                Ok(_) => return Ok(None),
                Err(Error::NotFound { .. }) => {}
                Err(error) => return Err(error),
            }
            names.extend(store.schedules(space).await?.into_iter().map(|one| one.definition.name));
            None
        }
    };
    if names.contains(name) {
        return Ok(None);
    }
    if let Some(filter) = filter
        && !store.sessions(&filter).await?.is_empty()
    {
        return Ok(None);
    }
    let shown: Vec<&str> = names.iter().take(SHOWN).map(String::as_str).collect();
    let more = if names.len() > SHOWN { ", …" } else { "" };
    let there_is =
        if shown.is_empty() { String::new() } else { format!("; there is {}{more}", shown.join(", ")) };
    let (kind, name) = (subject.kind.as_str(), subject.name.as_str());
    Ok(Some(format!("nothing here has been called {kind} {name} so far{there_is}")))
}

/// Ends a pause: 202. What waits goes on at the rate.
pub(super) async fn end(
    State(ctx): State<Arc<Ctx>>,
    caller: Caller,
    body: Body,
) -> Result<(StatusCode, Json<Value>), Problem> {
    let asked: EndInput = parse(&body?)?;
    let subjects = Subject::shown(kind(&asked.kind)?, asked.name.as_deref(), caller.space())
        .map_err(Problem::bad_request)?;
    let subject = ctx.store.resume_first(&subjects, rate(asked.rate)?).await?;
    Ok((StatusCode::ACCEPTED, Json(json!({"kind": subject.kind.as_str(), "name": subject.name}))))
}

fn kind(word: &str) -> Result<Kind, Problem> {
    let kinds = || Kind::ALL.map(Kind::as_str).join(", ");
    Kind::parse(word).ok_or_else(|| Problem::bad_request(format!("`kind` is one of {}", kinds())))
}

fn rate(rate: Option<f64>) -> Result<Option<f64>, Problem> {
    match rate {
        Some(rate) if !(rate > 0.0 && rate <= FASTEST) => {
            Err(Problem::bad_request(format!("`rate` is above 0 and at most {FASTEST} sessions a second")))
        }
        rate => Ok(rate),
    }
}

/// What the API's document says of these routes.
pub(crate) fn operations() -> Vec<Operation> {
    vec![
        Operation::get("/v1/pauses", "What is paused").answers(
            StatusCode::OK,
            "every pause",
            crate::object! {"items": Vec<Pause>},
        ),
        Operation::post("/v1/pauses", "Pauses something, or changes its pause").body::<BeginInput>().answers(
            StatusCode::CREATED,
            "paused",
            of::<Paused>(),
        ),
        Operation::post("/v1/pauses/end", "Ends a pause: what waits goes on")
            .body::<EndInput>()
            .answers(StatusCode::ACCEPTED, "ended", crate::object! {"kind": String, "name": String})
            .refuses(&[StatusCode::NOT_FOUND]),
    ]
}
