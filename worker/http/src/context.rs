//! Shows what the model would see if it were called now, and what each context strategy would send.

use crate::access::Caller;
use crate::body::Id;
use crate::openapi::Operation;
use crate::openapi::{either, of};
use crate::problem::Problem;
use axum::Json;
use axum::extract::rejection::QueryRejection;
use axum::extract::{Query, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::sync::Arc;
use wakeful_config::Config;
use wakeful_engine::ctx::Ctx;
use wakeful_engine::model::Models;
use wakeful_engine::tool::registry::Registry;
use wakeful_workflow::agent::ToolDefinition;
use wakeful_workflow::context::{self, Weight, compaction};
use wakeful_workflow::record::{Content, Usage};
use wakeful_workflow::session::Session;
use wakeful_workflow::strategy::{ContextPolicy, Rebase, Strategy};

/// A preview of a session's next model call.
#[derive(Debug, Serialize, JsonSchema)]
#[schemars(rename = "Context")]
pub struct View {
    pub session_id: String,
    pub agent: String,
    pub model: String,
    pub strategy: Strategy,
    /// The model's context window.
    pub window_tokens: i64,
    #[serde(flatten)]
    pub weight: Weight,
    /// Where the context begins. Absent if it contains everything.
    pub rebase: Option<Rebase>,
    /// The next call makes this rebase; it is not committed yet.
    pub rebased_now: bool,
    /// Whether the next call would first write a summary.
    pub compaction_due: bool,
    pub compaction_failures: i64,
    pub system: String,
    pub tools: Vec<ToolDefinition>,
    /// The messages. Absent if they were not asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub shown: Option<Vec<Shown>>,
    /// The size of the request under each strategy.
    pub strategies: Vec<Outlook>,
    /// The body of the request as it would be sent.
    #[serde(skip)]
    pub request: Option<Vec<u8>>,
}

/// One message that the model would see.
#[derive(Debug, Serialize, JsonSchema)]
#[schemars(rename = "ContextMessage")]
pub struct Shown {
    /// `None` for a seed, and for a message that waits in the inbox.
    pub message_number: Option<i64>,
    pub role: &'static str,
    pub bytes: usize,
    pub content: Content,
}

/// The size and cost of the request under one strategy.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Outlook {
    pub strategy: Strategy,
    pub current: bool,
    #[serde(flatten)]
    pub weight: Weight,
    /// The share of the model's window.
    pub window_percent: f64,
    /// The cost of one call's input if the provider has cached none of it. The next field is the cost if it
    /// has cached all of it.
    pub cost_micros: i64,
    pub cached_cost_micros: i64,
}

/// Why the preview cannot be made: the configuration lacks something that the session needs.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct NotConfigured(String);

/// Which parts of a [`View`] are made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// Everything but the messages. In a long session they are most of it.
    Sizes,
    Messages,
    /// The body of the request too.
    Request,
}

/// The result of `GET /v1/sessions/{id}/context` and `wakeful session context`. `strategy` replaces the
/// agent's own. For [`Part::Sizes`], an outline of the session is enough.
///
/// # Errors
/// [`NotConfigured`].
pub fn view(
    (config, registry, models): (&Config, &Registry, &Models),
    session: &Session,
    strategy: Option<Strategy>,
    part: Part,
) -> Result<View, NotConfigured> {
    let agent = config.agent_in(&session.space_id, &session.agent);
    let agent = agent.map_err(|error| NotConfigured(error.to_string()))?;
    let agent = session.policy.of(agent);
    let configured = match session.prefix {
        Some(_) => Vec::new(),
        None => registry.definitions(&agent.tools).map_err(|error| NotConfigured(error.to_string()))?,
    };
    let window_tokens = config.context_window(&agent.model);
    let price = config.price(&agent.model);
    let asked = strategy.unwrap_or(agent.context.strategy);
    let weigh = |strategy| context::weigh_as(session, &configured, &agent.context, window_tokens, strategy);
    let summarises = ContextPolicy { strategy: Strategy::Compaction, ..agent.context };
    let due = compaction::is_due(session, &configured, &summarises, window_tokens);
    let strategies = Strategy::ALL
        .into_iter()
        .map(|strategy| {
            let weight = match strategy {
                Strategy::Compaction if due => compaction::estimate(session, &configured, window_tokens),
                strategy => weigh(strategy).0,
            };
            let usage =
                |cached_tokens| Usage { input_tokens: weight.tokens, cached_tokens, ..Usage::default() };
            Outlook {
                strategy,
                current: strategy == agent.context.strategy,
                weight,
                window_percent: weight.tokens as f64 * 100.0 / window_tokens as f64,
                cost_micros: price.cost_micros(&usage(0)),
                cached_cost_micros: price.cost_micros(&usage(weight.tokens)),
            }
        })
        .collect();
    let (weight, moved) = weigh(asked);
    let rebased_now = moved.is_some();
    let standing = session.rebase.clone().filter(|_| asked == agent.context.strategy);
    let rebase = moved.or(standing).filter(|rebase| !rebase.is_nothing());
    let (system, tools) = context::head(session, configured.clone());
    let (mut shown, mut request) = (None, None);
    if part != Part::Sizes {
        let context = context::build_as(session, configured, &agent.context, window_tokens, asked).context;
        if part == Part::Request {
            let body = models.get(&agent.model).map(|model| model.request(&context).body);
            request = Some(body.map_err(|fault| NotConfigured(fault.to_string()))?);
        }
        let numbers = context::numbered(session, rebase.as_ref());
        let messages = numbers.into_iter().zip(context.messages).map(|(message_number, message)| Shown {
            message_number,
            role: message.role.as_str(),
            bytes: message.bytes(),
            content: message.content,
        });
        shown = Some(messages.collect());
    }
    Ok(View {
        session_id: session.session_id.to_string(),
        agent: agent.name,
        model: agent.model,
        strategy: asked,
        window_tokens,
        weight,
        rebase,
        rebased_now,
        compaction_due: asked == Strategy::Compaction && due,
        compaction_failures: session.compaction_failures,
        system,
        tools: tools.to_vec(),
        shown,
        strategies,
        request,
    })
}

/// Parses the name of a strategy.
///
/// # Errors
/// A sentence that lists the known names.
pub fn strategy(word: &str) -> Result<Strategy, String> {
    Strategy::parse(word).ok_or_else(|| {
        let known = Strategy::ALL.map(Strategy::as_str).join(", ");
        format!("no strategy {word:?}; there are: {known}")
    })
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct ContextQuery {
    strategy: Option<String>,
    /// Return only the request's body.
    #[serde(default)]
    raw: bool,
    /// With `false`, the sizes without the messages.
    messages: Option<bool>,
}

/// Shows the context of the session's next model call. With `raw`, returns the exact bytes that would be
/// sent.
pub(super) async fn show(
    State(ctx): State<Arc<Ctx>>,
    caller: Caller,
    Id(id): Id,
    query: Result<Query<ContextQuery>, QueryRejection>,
) -> Result<Response, Problem> {
    let Query(query) = query?;
    let asked = query.strategy.as_deref().map(strategy).transpose().map_err(Problem::bad_request)?;
    ctx.store.session_within(&caller.reach, &id).await?;
    let part = match query {
        ContextQuery { raw: true, .. } => Part::Request,
        ContextQuery { messages: Some(false), .. } => Part::Sizes,
        ContextQuery { .. } => Part::Messages,
    };
    let read = match part {
        Part::Sizes => ctx.outlines.read(&ctx.store, &id).await?,
        Part::Messages | Part::Request => ctx.store.hydrate_to_keep(&id).await?,
    };
    let view = view((&ctx.config, &ctx.plugins.tools, &ctx.plugins.models), &read.session, asked, part);
    if part == Part::Sizes {
        ctx.outlines.keep(read);
    }
    let view = view.map_err(|NotConfigured(text)| Problem::new(StatusCode::CONFLICT, text))?;
    Ok(match view.request {
        Some(body) => ([(header::CONTENT_TYPE, "application/json")], body).into_response(),
        None => Json(view).into_response(),
    })
}

/// What the API's document says of these routes.
pub(crate) fn operations() -> Vec<Operation> {
    vec![
        Operation::get(
            "/v1/sessions/{id}/context",
            "What the model would see now; with `raw`, the request's bytes",
        )
        .query::<ContextQuery>()
        .answers(
            StatusCode::OK,
            "the context, or the request of the model's provider",
            either(of::<View>(), of::<Value>()),
        )
        .refuses(&[StatusCode::CONFLICT]),
    ]
}
