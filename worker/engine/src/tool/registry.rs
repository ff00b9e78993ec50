//! The tools of a worker, by name, each with its compiled argument schema.

use super::{Tool, ToolCallContext, ToolError, ToolOutput};
use futures::FutureExt as _;
use jsonschema::{ValidationError, Validator};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;
use tracing::warn;
use wakeful_workflow::agent::ToolDefinition;
use wakeful_workflow::derive::is_anothers;
use wakeful_workflow::policy::ToolMode;

/// Longest error text for the model: enough to correct a call, too little to fill the context.
const MAX_ERROR_BYTES: usize = 1024;

/// How long a tool may take to close what it keeps open.
const CLOSING: Duration = Duration::from_secs(10);

/// Every tool that a worker can run.
#[derive(Default)]
pub struct Registry {
    tools: BTreeMap<String, Entry>,
}

struct Entry {
    tool: Arc<dyn Tool>,
    definition: ToolDefinition,
    validator: Validator,
}

/// Why a tool could not be registered or found. Each is a mistake in the configuration or in the tool's code.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum RegistryError {
    #[error("the tool name {name:?} is not 1 to 64 letters, digits, `_` or `-`")]
    BadName { name: String },
    #[error("two tools are called `{name}`")]
    Duplicate { name: String },
    #[error("the parameters of tool `{name}` are no JSON schema of type object: {message}")]
    BadSchema { name: String, message: String },
    #[error("there is no tool `{name}`{hint}")]
    Unknown { name: String, hint: String },
}

impl Registry {
    /// Creates a registry without tools.
    pub fn new() -> Self {
        Registry::default()
    }

    /// Creates a registry of the tools that come with Wakeful.
    ///
    /// # Errors
    /// None in practice; see [`Registry::register`].
    pub fn built_in() -> Result<Self, RegistryError> {
        let mut registry = Registry::new();
        registry.register(Arc::new(super::ask_user::AskUser))?;
        registry.register(Arc::new(super::compose_email::ComposeEmail))?;
        registry.register(Arc::new(super::current_time::CurrentTime))?;
        registry.register(Arc::new(super::files::EditFile))?;
        registry.register(Arc::new(super::files::ListFiles))?;
        registry.register(Arc::new(super::files::ReadFile))?;
        registry.register(Arc::new(super::files::SearchFiles))?;
        registry.register(Arc::new(super::files::WriteFile))?;
        registry.register(Arc::new(super::read_attachment::ReadAttachment))?;
        registry.register(Arc::new(super::read_output::ReadOutput))?;
        Ok(registry)
    }

    /// Adds `tool` and compiles its schema.
    ///
    /// # Errors
    /// A name outside `[a-zA-Z0-9_-]{1,64}` (the names that every provider accepts), a name already in use,
    /// or a schema that is invalid, refers outside itself or is not of type object.
    pub fn register(&mut self, tool: Arc<dyn Tool>) -> Result<(), RegistryError> {
        let definition = tool.definition();
        let name = definition.name.clone();
        if !is_valid_name(&name) {
            return Err(RegistryError::BadName { name });
        }
        if self.tools.contains_key(&name) {
            return Err(RegistryError::Duplicate { name });
        }
        if definition.parameters.get("type").and_then(Value::as_str) != Some("object") {
            return Err(RegistryError::BadSchema { name, message: "`type` is not \"object\"".into() });
        }
        let validator = match jsonschema::validator_for(&definition.parameters) {
            Ok(validator) => validator,
            Err(error) => return Err(RegistryError::BadSchema { name, message: error.to_string() }),
        };
        self.tools.insert(name, Entry { tool, definition, validator });
        Ok(())
    }

    /// Returns the tool called `name`.
    pub fn get(&self, name: &str) -> Option<&Arc<dyn Tool>> {
        self.tools.get(name).map(|entry| &entry.tool)
    }

    /// Returns the definition that the tool called `name` was registered with.
    pub fn definition(&self, name: &str) -> Option<&ToolDefinition> {
        self.tools.get(name).map(|entry| &entry.definition)
    }

    /// Returns every name, sorted.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tools.keys().map(String::as_str)
    }

    /// Returns the definitions of `names`, sorted by name and without duplicates. The order of `names` must
    /// not matter, because every request begins with these definitions.
    ///
    /// # Errors
    /// [`RegistryError::Unknown`] with the nearest known name.
    pub fn definitions<S: AsRef<str>>(&self, names: &[S]) -> Result<Vec<ToolDefinition>, RegistryError> {
        let mut sorted: Vec<&str> = names.iter().map(AsRef::as_ref).collect();
        sorted.sort_unstable();
        sorted.dedup();
        let mut definitions = Vec::with_capacity(sorted.len());
        for name in sorted {
            match self.definition(name) {
                Some(definition) => definitions.push(definition.clone()),
                None => {
                    let mut hint = self.hint(name);
                    // Only a name that resembles none may be right in another program.
                    if !hint.ends_with('?') {
                        hint.push_str(
                            "; a tool of your own is in your own program: run that instead of `wakeful`",
                        );
                    }
                    return Err(RegistryError::Unknown { name: name.to_owned(), hint });
                }
            }
        }
        Ok(definitions)
    }

    /// Checks `arguments` against the schema of the tool called `name`.
    ///
    /// # Errors
    /// An unknown tool, or the list of all violations with their paths and what was expected there, in about
    /// 1 KB at most.
    pub fn validate(&self, name: &str, arguments: &Value) -> Result<(), ToolError> {
        violations(name, &self.entry(name)?.validator, arguments)
    }

    /// Checks `arguments` against the schema in `told`, the definition that the model got. A session keeps
    /// the definitions that it began with, and the registered tool may have another schema by now.
    ///
    /// # Errors
    /// Those of [`Registry::validate`].
    pub fn validate_as(&self, told: &ToolDefinition, arguments: &Value) -> Result<(), ToolError> {
        let entry = self.entry(&told.name)?;
        if entry.definition.parameters == told.parameters {
            return violations(&told.name, &entry.validator, arguments);
        }
        match jsonschema::validator_for(&told.parameters) {
            Ok(validator) => violations(&told.name, &validator, arguments),
            // An invalid schema cannot check anything; the tool still parses its arguments.
            Err(_) => Ok(()),
        }
    }

    /// Validates `arguments`, runs the call and replaces NULs in its output.
    ///
    /// # Errors
    /// Those of [`Registry::validate`] and the tool's own.
    pub async fn call(
        &self,
        name: &str,
        call: &ToolCallContext,
        arguments: Value,
    ) -> Result<ToolOutput, ToolError> {
        self.validate(name, &arguments)?;
        self.run(name, call, arguments).await
    }

    /// Like [`Registry::call`], for arguments that are validated already. Runs a dry run unless the call's
    /// mode is live.
    ///
    /// # Errors
    /// An unknown tool, and the tool's own.
    pub async fn run(
        &self,
        name: &str,
        call: &ToolCallContext,
        arguments: Value,
    ) -> Result<ToolOutput, ToolError> {
        let tool = &self.entry(name)?.tool;
        // Never use `call` directly for a dry run: a tool with effects would act on the outside world.
        let output = match call.mode {
            ToolMode::Live => tool.call(call, arguments).await,
            ToolMode::Dry | ToolMode::Recorded => tool.dry_run(call, arguments).await,
        };
        match output {
            Ok(output) => Ok(without_acts(name, output).bounded(name).without_nul()),
            Err(error) => Err(error.without_nul()),
        }
    }

    /// Lets every tool close what it keeps open: see [`Tool::close`]. A tool that hangs or panics does not keep the
    /// others from closing, or the process from ending.
    pub async fn close(&self) {
        let all = self.tools.iter().map(|(name, entry)| async move {
            let closed = tokio::time::timeout(CLOSING, AssertUnwindSafe(async { entry.tool.close().await }).catch_unwind()).await;
            if !matches!(closed, Ok(Ok(()))) {
                warn!(tool = %name, "A tool did not close what it kept open: it panicked, or took more than {CLOSING:?}");
            }
        });
        futures::future::join_all(all).await;
    }

    fn entry(&self, name: &str) -> Result<&Entry, ToolError> {
        self.tools.get(name).ok_or_else(|| {
            let shown = clip(name, 80);
            ToolError::new(format!("There is no tool `{shown}`{}.", self.hint(name))).without_nul()
        })
    }

    fn hint(&self, name: &str) -> String {
        if self.tools.is_empty() {
            return "; no tools are registered".into();
        }
        // A hostile name may be long, and computing the distance takes quadratic time.
        let name = clip(name, 80);
        let nearest = self
            .names()
            .map(|known| (strsim::jaro_winkler(&name, known), known))
            .max_by(|a, b| a.0.total_cmp(&b.0))
            .filter(|(similarity, _)| *similarity >= 0.7);
        match nearest {
            Some((_, known)) => format!("; did you mean `{known}`?"),
            None => format!("; known tools: {}", clip(&self.names().collect::<Vec<_>>().join(", "), 400)),
        }
    }
}

/// Removes details that would act, unless they are the tool's own.
fn without_acts(tool: &str, mut output: ToolOutput) -> ToolOutput {
    if output.details.as_ref().is_some_and(|details| is_anothers(tool, details)) {
        tracing::warn!(
            tool,
            "Left out a tool's details: their type is of a built-in tool, and they would act"
        );
        output.details = None;
    }
    output
}

/// Checks `arguments` against the schema of a tool that this process need not have.
///
/// # Errors
/// The list of all violations.
pub fn fits(tool: &ToolDefinition, arguments: &Value) -> Result<(), String> {
    match jsonschema::validator_for(&tool.parameters) {
        Ok(validator) => violations(&tool.name, &validator, arguments).map_err(|error| error.text),
        // An invalid schema cannot check anything.
        Err(_) => Ok(()),
    }
}

fn violations(name: &str, validator: &Validator, arguments: &Value) -> Result<(), ToolError> {
    if validator.is_valid(arguments) {
        return Ok(());
    }
    let violations: Vec<String> = validator.iter_errors(arguments).map(|error| describe(&error)).collect();
    if violations.is_empty() { Ok(()) } else { Err(ToolError::new(refusal(name, &violations))) }
}

fn is_valid_name(name: &str) -> bool {
    (1..=64).contains(&name.len())
        && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_' || byte == b'-')
}

/// Describes one violation: where it is, and what is expected there. The offending value is cut short,
/// because the model wrote it and knows it.
fn describe(error: &ValidationError<'_>) -> String {
    let path = error.instance_path().to_string();
    let place = if path.is_empty() { "the arguments".to_owned() } else { format!("`{}`", clip(&path, 120)) };
    let found = clip(&error.instance().to_string(), 40);
    format!("{place}: {}", clip(&error.masked_with(found).to_string(), 240))
}

fn refusal(name: &str, violations: &[String]) -> String {
    let mut text = format!("The arguments of `{name}` do not fit its schema. Mend them and call it again:");
    for (n, violation) in violations.iter().enumerate() {
        let rest = violations.len() - n;
        if text.len() + violation.len() + 40 > MAX_ERROR_BYTES {
            // Writing to a string cannot fail.
            let _ = write!(text, "\n- and {rest} more");
            break;
        }
        let _ = write!(text, "\n- {violation}");
    }
    text
}

/// Cuts `text` to at most `max` bytes, with an ellipsis.
fn clip(text: &str, max: usize) -> String {
    if text.len() <= max {
        return text.to_owned();
    }
    let end = text.floor_char_boundary(max.saturating_sub('…'.len_utf8()));
    format!("{}…", &text[..end])
}

#[cfg(test)]
mod tests {
    use super::*;
    use async_trait::async_trait;
    use serde_json::json;
    use wakeful_workflow::bundle::redact::OWN_TOOLS;
    use wakeful_workflow::effect::Effect;

    struct Fake(&'static str, Value);

    #[async_trait]
    impl Tool for Fake {
        fn definition(&self) -> ToolDefinition {
            ToolDefinition::new(self.0, String::new(), self.1.clone(), Effect::Pure)
        }

        async fn call(&self, _: &ToolCallContext, arguments: Value) -> Result<ToolOutput, ToolError> {
            Ok(ToolOutput::text(format!("{}\0", arguments["word"].as_str().unwrap_or_default())))
        }
    }

    fn object() -> Value {
        json!({"type": "object"})
    }

    fn register(name: &'static str, schema: Value) -> Result<Registry, RegistryError> {
        let mut registry = Registry::new();
        registry.register(Arc::new(Fake(name, schema)))?;
        Ok(registry)
    }

    fn strict() -> Registry {
        let schema = json!({
            "type": "object",
            "properties": {
                "word": {"type": "string", "maxLength": 5},
                "many": {"type": "array", "items": {"type": "integer"}},
            },
            "required": ["word"],
            "additionalProperties": false,
        });
        register("strict", schema).unwrap()
    }

    #[test]
    fn every_built_in_tool_registers() {
        let registry = Registry::built_in().unwrap();
        let names: Vec<&str> = registry.names().collect();
        assert_eq!(names, OWN_TOOLS, "a redacted bundle shows these names and no others");
        for name in names {
            let definition = registry.definition(name).unwrap();
            assert!(!definition.description.is_empty(), "{name} has no description");
            assert_eq!(definition.parameters["additionalProperties"], json!(false), "{name} is not closed");
        }
    }

    #[test]
    fn definitions_are_sorted_by_name_and_unique() {
        let registry = Registry::built_in().unwrap();
        let names = ["write_file", "ask_user", "write_file", "current_time"];
        let sorted: Vec<String> =
            registry.definitions(&names).unwrap().into_iter().map(|definition| definition.name).collect();
        assert_eq!(sorted, ["ask_user", "current_time", "write_file"]);
    }

    #[test]
    fn an_unknown_tool_is_named_with_the_nearest_known_one() {
        let registry = Registry::built_in().unwrap();
        let error = registry.definitions(&["read_fil"]).unwrap_err().to_string();
        assert_eq!(error, "there is no tool `read_fil`; did you mean `read_file`?");
        let error = registry.definitions(&["zzz"]).unwrap_err().to_string();
        assert!(error.contains("known tools: ask_user, compose_email"), "{error}");
        assert!(error.ends_with("run that instead of `wakeful`"), "{error}");
        let error = registry.validate("writefile", &json!({})).unwrap_err().to_string();
        assert!(error.contains("did you mean `write_file`?"), "{error}");
    }

    #[test]
    fn a_hostile_tool_name_gives_a_short_error() {
        let registry = Registry::built_in().unwrap();
        let error = registry.validate(&"é\0".repeat(100_000), &json!({})).unwrap_err().to_string();
        assert!(error.len() <= MAX_ERROR_BYTES, "{}", error.len());
        assert!(!error.contains('\0'));
    }

    #[test]
    fn a_name_outside_the_alphabet_or_length_is_refused() {
        for name in ["", "a b", "a.b", "é", "a/b", "a\n"] {
            let refused = matches!(register(name, object()), Err(RegistryError::BadName { .. }));
            assert!(refused, "{name:?} was taken");
        }
        let long: &'static str = "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa";
        assert_eq!(long.len(), 65);
        assert!(matches!(register(long, object()), Err(RegistryError::BadName { .. })));
        assert!(register(&long[1..], object()).is_ok());
        assert!(register("mcp-x_Y9", object()).is_ok());
    }

    #[test]
    fn a_name_can_be_taken_once() {
        let mut registry = register("one", object()).unwrap();
        let error = registry.register(Arc::new(Fake("one", object()))).unwrap_err();
        assert_eq!(error, RegistryError::Duplicate { name: "one".into() });
    }

    #[test]
    fn an_invalid_schema_is_refused_at_registration() {
        for schema in [
            json!({"type": "object", "properties": {"a": {"type": "strng"}}}),
            json!({"type": "object", "properties": {"a": {"pattern": "("}}}),
            json!({"type": "object", "properties": {"a": {"$ref": "http://localhost:1/x"}}}),
            json!({"type": "string"}),
            json!(true),
        ] {
            let refused = matches!(register("bad", schema.clone()), Err(RegistryError::BadSchema { .. }));
            assert!(refused, "{schema} was taken");
        }
    }

    #[test]
    fn a_refusal_names_every_violated_path_and_what_is_expected() {
        let error = strict()
            .validate("strict", &json!({"word": "too long", "many": [1, "two"], "other": 1}))
            .unwrap_err()
            .to_string();
        assert!(error.contains("`/word`") && error.contains("5 characters"), "{error}");
        assert!(error.contains("`/many/1`") && error.contains("integer"), "{error}");
        assert!(error.contains("other"), "{error}");
        let error = strict().validate("strict", &json!({})).unwrap_err().to_string();
        assert!(error.contains("\"word\" is a required property"), "{error}");
        assert!(strict().validate("strict", &json!({"word": "fits"})).is_ok());
    }

    #[test]
    fn a_refusal_of_hostile_arguments_stays_short() {
        let many: Vec<String> = (0..5000).map(|n| format!("{n} {}", "x".repeat(2000))).collect();
        let error = strict().validate("strict", &json!({"word": "a", "many": many})).unwrap_err().to_string();
        assert!(error.len() <= MAX_ERROR_BYTES, "{}", error.len());
        assert!(error.ends_with("more"), "{error}");
        for hostile in [json!(null), json!([]), json!("x".repeat(100_000)), json!({"x".repeat(100_000): 1})] {
            let error = strict().validate("strict", &hostile).unwrap_err().to_string();
            assert!(error.len() <= MAX_ERROR_BYTES, "{}", error.len());
        }
    }

    #[tokio::test]
    async fn a_call_is_validated_first_and_its_nuls_are_replaced() {
        let call = crate::tool::files::tests::context(std::path::Path::new("none"), false);
        let output = strict().call("strict", &call, json!({"word": "hi"})).await.unwrap();
        assert_eq!(output.content, "hi\u{fffd}");
        assert!(strict().call("strict", &call, json!({"word": 1})).await.is_err());
    }

    /// Returns what a server said as its details.
    struct PassesOn;

    #[async_trait::async_trait]
    impl Tool for PassesOn {
        fn definition(&self) -> ToolDefinition {
            ToolDefinition::new(
                "lookup",
                "",
                json!({"type": "object"}),
                wakeful_workflow::effect::Effect::Pure,
            )
        }

        async fn call(&self, _: &ToolCallContext, said: Value) -> Result<ToolOutput, ToolError> {
            Ok(ToolOutput::text("Done.").with_details(said))
        }
    }

    #[tokio::test]
    async fn a_tool_that_passes_on_what_a_server_said_sends_no_mail() {
        let mut registry = Registry::new();
        registry.register(Arc::new(PassesOn)).unwrap();
        let details = async |kind: &str| {
            let said = json!({"type": kind, "to": ["eve@example.org"]});
            registry.call("lookup", &ToolCallContext::detached("call_1"), said).await.unwrap().details
        };
        assert_eq!(details("sentEmail").await, None);
        assert!(details("looked").await.is_some());
    }
}
