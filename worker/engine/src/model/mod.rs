//! Models: the trait, and one file per provider.
//!
//! A model does two things: it projects the context onto its protocol, which is a pure function, and it makes
//! a streaming call. A new provider needs a file here, its projection in `wakeful_workflow::wire`, and a line
//! in `Models`.
#![deny(missing_docs)]

use crate::web::{self, Reach};
use async_trait::async_trait;
use secrecy::ExposeSecret;
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tracing::warn;
use wakeful_config::{Config, Provider};
use wakeful_workflow::context::Context;
use wakeful_workflow::fault::Fault;
use wakeful_workflow::record::{FinishReason, Reply, ToolCall, Usage};
use wakeful_workflow::wire::{Protocol, Request};

pub mod anthropic;
#[allow(missing_docs, reason = "not part of the library's front")]
pub mod call;
#[cfg(test)]
mod faults;
pub mod openai;
#[allow(missing_docs, reason = "not part of the library's front")]
pub mod provider_error;
#[allow(missing_docs, reason = "not part of the library's front")]
pub mod renderings;
#[allow(missing_docs, reason = "not part of the library's front")]
pub mod scripted;

/// Output limit of a model for which none is configured.
const MAX_OUTPUT_TOKENS: u32 = 8192;

/// A model of one provider.
#[async_trait]
pub trait Model: Send + Sync {
    /// Builds the request body for `context`. Pure: the same context gives the same bytes.
    fn request(&self, context: &Context) -> Request;

    /// Returns the protocol of [`Model::request`], if a request can go on from the bytes of the session's request
    /// before. A long session then renders and hashes only what is new. Without it, every request is built whole.
    fn protocol(&self) -> Option<&dyn Protocol> {
        None
    }

    /// Returns whether the model can continue a text at the end of the request ([`Context::prefill`]). The
    /// reply then begins with that text; the deltas do not.
    fn takes_prefill(&self) -> bool {
        false
    }

    /// Sends `request` and streams the answer.
    ///
    /// Each piece of text goes to `deltas` as it arrives. The future may be dropped at any await; the call is
    /// then abandoned and nothing of it counts.
    ///
    /// # Errors
    /// A typed [`Fault`]. A stream that ends without its protocol's end marker is [`Fault::StreamCut`]. A partial answer is
    /// never returned as a whole one. An answer with neither text nor a call is returned: the agent's settings say what
    /// follows it.
    async fn call(&self, request: &Request, deltas: &mut dyn Deltas) -> Result<Reply, Fault>;
}

/// Builds a model from the part of its name after the slash.
pub type Factory = Arc<dyn Fn(&str) -> Result<Arc<dyn Model>, Fault> + Send + Sync>;

/// The models of a process, by `provider/model`. Each is built when it is first requested.
#[derive(Default)]
pub struct Models {
    providers: BTreeMap<String, Factory>,
    /// How the ids of a provider's gates end, for each provider whose calls can fail by an outage.
    gates: BTreeMap<String, String>,
    /// The gates of the models that were asked for.
    gate_ids: Mutex<BTreeMap<String, Arc<str>>>,
    made: Mutex<BTreeMap<String, Arc<dyn Model>>>,
}

impl Models {
    /// Creates the Anthropic, OpenAI and scripted models, as configured.
    ///
    /// # Errors
    /// When the HTTP client cannot be built.
    pub fn built_in(config: &Config) -> Result<Models, reqwest::Error> {
        let mut models = Models::default();
        let endpoint = |provider: &Provider, official: &str| -> Result<call::Endpoint, reqwest::Error> {
            let base_url = provider.base_url.clone().unwrap_or_else(|| official.to_owned());
            let client = web::client(Reach::Named(&[&base_url]));
            Ok(call::Endpoint {
                client: client.connect_timeout(Duration::from_secs(provider.connect_s)).build()?,
                base_url,
                api_key: provider.api_key.clone(),
                idle_timeout_ms: provider.idle_s * 1000,
                total_timeout_ms: provider.total_s * 1000,
            })
        };
        let max_tokens = |provider: &'static str| {
            let settings = config.models.clone();
            move |name: &str| {
                let configured =
                    settings.get(&format!("{provider}/{name}")).and_then(|one| one.max_output_tokens);
                configured.and_then(|tokens| u32::try_from(tokens).ok()).unwrap_or(MAX_OUTPUT_TOKENS)
            }
        };
        let prices = config.clone();
        // The factory runs once per model, so the warning is logged once.
        let warn_unpriced = Arc::new(move |model: String| {
            if !prices.has_price(&model) {
                warn!(model, "No price is configured for this model: its calls count as free");
            }
        });
        let at = endpoint(&config.providers.anthropic, anthropic::BASE_URL)?;
        let anthropic_gate = account(&at);
        let limit = max_tokens("anthropic");
        let unpriced = Arc::clone(&warn_unpriced);
        let prefill = config.models.clone();
        models.add("anthropic", move |name| {
            unpriced(format!("anthropic/{name}"));
            let options = wakeful_workflow::wire::anthropic::Options {
                prefill: prefill.get(&format!("anthropic/{name}")).is_some_and(|one| one.prefill),
                ..wakeful_workflow::wire::anthropic::Options::new(name, limit(name))
            };
            Ok(Arc::new(anthropic::Anthropic::new(at.clone(), options)))
        });
        let at = endpoint(&config.providers.openai, openai::BASE_URL)?;
        let openai_gate = account(&at);
        let limit = max_tokens("openai");
        let settings = config.models.clone();
        models.add("openai", move |name| {
            warn_unpriced(format!("openai/{name}"));
            let given = settings.get(&format!("openai/{name}")).copied().unwrap_or_default();
            let options = wakeful_workflow::wire::openai::Options {
                merge_turns: given.merge_turns,
                legacy_max_tokens: given.legacy_max_tokens,
                ..wakeful_workflow::wire::openai::Options::new(name, limit(name))
            };
            Ok(Arc::new(openai::OpenAi::new(at.clone(), options)))
        });
        let dir = config.scripted.dir.clone();
        models.add("scripted", move |name| {
            let scripted = scripted::Scripted::load(dir.as_deref(), name)
                .map_err(|error| Fault::NotConfigured { message: error.to_string() })?;
            Ok(Arc::new(scripted))
        });
        // A script answers without a network, and one script's fault says nothing about another's.
        models.gates.remove("scripted");
        models.gates.insert("anthropic".to_owned(), anthropic_gate);
        models.gates.insert("openai".to_owned(), openai_gate);
        Ok(models)
    }

    /// Adds a provider, or replaces one.
    pub fn add(
        &mut self,
        provider: &str,
        factory: impl Fn(&str) -> Result<Arc<dyn Model>, Fault> + Send + Sync + 'static,
    ) {
        self.providers.insert(provider.to_owned(), Arc::new(factory));
        self.gates.insert(provider.to_owned(), "program".to_owned());
    }

    /// The names of the providers.
    pub fn providers(&self) -> impl Iterator<Item = &str> {
        self.providers.keys().map(String::as_str)
    }

    /// Returns the gate that the calls of the model with this name pass. `None`: they pass none. Each model has its own: a
    /// provider limits the rate of each, and one may be overloaded while its neighbour answers.
    pub fn gate_of(&self, name: &str) -> Option<Arc<str>> {
        let account = self.gates.get(provider_of(name))?;
        let mut known = self.gate_ids.lock().unwrap_or_else(PoisonError::into_inner);
        // Each step asks more than once.
        if let Some(id) = known.get(name) {
            return Some(Arc::clone(id));
        }
        let id: Arc<str> = format!("{name}@{account}").into();
        known.insert(name.to_owned(), Arc::clone(&id));
        Some(id)
    }

    /// Returns the model of that name.
    ///
    /// # Errors
    /// [`Fault::NotConfigured`] for a provider that this process does not have, or the factory's error.
    pub fn get(&self, name: &str) -> Result<Arc<dyn Model>, Fault> {
        let mut made = self.made.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(model) = made.get(name) {
            return Ok(Arc::clone(model));
        }
        let (provider, rest) = name.split_once('/').unwrap_or((name, ""));
        let factory = self.providers.get(provider).ok_or_else(|| Fault::NotConfigured {
            message: format!(
                "no provider {provider:?} for the model {name:?}; there are: {}",
                self.providers.keys().cloned().collect::<Vec<_>>().join(", ")
            ),
        })?;
        let model = factory(rest)?;
        made.insert(name.to_owned(), Arc::clone(&model));
        Ok(model)
    }
}

/// The provider in a model's name.
pub(crate) fn provider_of(name: &str) -> &str {
    name.split_once('/').map_or(name, |(provider, _)| provider)
}

/// The address that calls of `model` go to, without its path. `None` for a provider that is not built in, and for a script, which makes
/// no call.
pub fn host_of(config: &Config, model: &str) -> Option<String> {
    let (provider, official) = match provider_of(model) {
        "anthropic" => (&config.providers.anthropic, anthropic::BASE_URL),
        "openai" => (&config.providers.openai, openai::BASE_URL),
        _ => return None,
    };
    let url = reqwest::Url::parse(provider.base_url.as_deref().unwrap_or(official)).ok()?;
    Some(url.origin().ascii_serialization())
}

/// Names one address and one credential in the id of a gate: another account, or another server, may well answer.
fn account(at: &call::Endpoint) -> String {
    let key = at.api_key.as_ref().map_or("", |key| key.expose_secret());
    let hash = Sha256::digest(format!("{}\n{key}", at.base_url));
    hash.iter().take(6).map(|byte| format!("{byte:02x}")).collect()
}

/// Receives the text of a running call.
pub trait Deltas: Send {
    /// Reports a first sign of the answer, whatever it is: the provider works on it. Text is a sign too.
    fn began(&mut self) {}

    /// Receives one piece of text, in order.
    fn text(&mut self, delta: &str);

    /// Reports that a part other than text has started: from now on the text alone is not the whole answer.
    fn not_text(&mut self) {}

    /// Receives the tokens that the provider has counted so far, if it says so before the answer's end. They are
    /// what a cancelled call counts.
    fn usage(&mut self, _so_far: Usage) {}
}

/// Drops the deltas.
#[cfg(test)]
pub struct NoDeltas;

#[cfg(test)]
impl Deltas for NoDeltas {
    fn text(&mut self, _delta: &str) {}
}

/// Builds the recorded form of a call from the text of its arguments.
fn tool_call(id: String, name: String, arguments: String, truncated: bool) -> ToolCall {
    let (arguments, malformed) = match call::arguments(arguments, truncated) {
        Ok(arguments) => (arguments, None),
        Err(raw) => (serde_json::Value::Object(serde_json::Map::new()), Some(raw)),
    };
    ToolCall { call_id: id.into(), name, arguments, malformed }
}

/// Returns `reply`, unless it is empty for a reason that an operator has to mend.
fn complete(reply: Reply) -> Result<Reply, Fault> {
    if !reply.is_empty() {
        return Ok(reply);
    }
    match reply.finish_reason {
        FinishReason::Stop | FinishReason::ToolCalls | FinishReason::Cancelled => Ok(reply),
        FinishReason::ContentFilter => Err(Fault::withheld()),
        FinishReason::Length => {
            let message = "the output limit was reached before any text: raise the model's max_tokens";
            Err(Fault::Refused { status: 200, message: message.to_owned() })
        }
    }
}
