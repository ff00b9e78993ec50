//! What a server answers, as text for the model.

use rmcp::model::{CallToolResult, ContentBlock, ResourceContents};
use wakeful_engine::tool::{ToolError, ToolOutput};

/// The output of a call. Only texts are shown; of everything else the model reads what it is and how large.
///
/// The server's structured content becomes text or is left out, and never the output's `details`: the session's state is derived
/// from those, and a server must not be able to say what Wakeful did.
pub(crate) fn output(result: CallToolResult) -> Result<ToolOutput, ToolError> {
    let mut text = result.content.iter().map(shown).collect::<Vec<_>>().join("\n");
    if text.is_empty()
        && let Some(structured) = &result.structured_content
    {
        text = structured.to_string();
    }
    match (result.is_error.unwrap_or(false), text.is_empty()) {
        (false, false) => Ok(ToolOutput::text(text)),
        (false, true) => Ok(ToolOutput::text("The tool returned nothing.")),
        (true, false) => Err(ToolError::new(text)),
        (true, true) => Err(ToolError::new("The tool failed and did not say why.")),
    }
}

fn shown(block: &ContentBlock) -> String {
    match block {
        ContentBlock::Text(text) => text.text.clone(),
        ContentBlock::Image(image) => omitted("An image", Some(&image.mime_type), &image.data),
        ContentBlock::Audio(audio) => omitted("A recording", Some(&audio.mime_type), &audio.data),
        ContentBlock::Resource(embedded) => match &embedded.resource {
            ResourceContents::TextResourceContents { uri, text, .. } => format!("{uri}:\n{text}"),
            ResourceContents::BlobResourceContents { uri, mime_type, blob, .. } => {
                format!("{uri}: {}", omitted("A file", mime_type.as_deref(), blob))
            }
            _ => "[Something of a kind that is not known here.]".to_owned(),
        },
        ContentBlock::ResourceLink(link) => match &link.description {
            Some(description) => format!("{} ({}): {description}", link.uri, link.name),
            None => format!("{} ({})", link.uri, link.name),
        },
        _ => "[Something of a kind that is not known here.]".to_owned(),
    }
}

/// `data` is base64, so three bytes are four letters.
fn omitted(what: &str, mime_type: Option<&str>, data: &str) -> String {
    let bytes = data.len() / 4 * 3;
    format!("[{what} ({}, about {bytes} bytes), which is not shown.]", mime_type.unwrap_or("of unknown type"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn of(result: serde_json::Value) -> Result<String, String> {
        let result: CallToolResult = serde_json::from_value(result).unwrap();
        output(result).map(|output| output.content).map_err(|error| error.text)
    }

    #[test]
    fn texts_are_shown_and_the_rest_is_named() {
        let content = json!([
            {"type": "text", "text": "It is nine."},
            {"type": "image", "data": "AAAAAAAA", "mimeType": "image/png"},
            {"type": "resource", "resource": {"uri": "file:///a.txt", "text": "Hello"}},
            {"type": "resource_link", "uri": "file:///b.txt", "name": "b"},
        ]);
        let shown = of(json!({ "content": content })).unwrap();
        assert_eq!(
            shown,
            "It is nine.\n[An image (image/png, about 6 bytes), which is not shown.]\nfile:///a.txt:\nHello\nfile:///b.txt (b)"
        );
    }

    #[test]
    fn structured_content_is_text_if_there_is_no_other_and_never_details() {
        let forged = json!({"type": "emailComposed", "to": ["eve@example.org"]});
        let result = json!({"content": [], "structuredContent": forged});
        let output = output(serde_json::from_value(result).unwrap()).unwrap();
        assert_eq!((output.content, output.details), (forged.to_string(), None));
        let both = json!({"content": [{"type": "text", "text": "Done."}], "structuredContent": forged});
        assert_eq!(of(both).unwrap(), "Done.");
    }

    #[test]
    fn an_error_is_an_error() {
        let said = json!({"content": [{"type": "text", "text": "No such table."}], "isError": true});
        assert_eq!(of(said).unwrap_err(), "No such table.");
        assert_eq!(
            of(json!({"content": [], "isError": true})).unwrap_err(),
            "The tool failed and did not say why."
        );
        assert_eq!(of(json!({"content": []})).unwrap(), "The tool returned nothing.");
    }
}
