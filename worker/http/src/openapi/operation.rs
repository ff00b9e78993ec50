//! One operation: what a method of a route takes and answers. Each module lists those of its own handlers.

use axum::http::StatusCode;
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde_json::{Map, Value};

/// Makes a schema. What is named in it goes among the document's components.
pub type Shape = Box<dyn Fn(&mut SchemaGenerator) -> Schema + Send + Sync>;

/// The schema of a type.
pub fn of<T: JsonSchema>() -> Shape {
    Box::new(|schemas| schemas.subschema_for::<T>())
}

/// The schema of a type, without its name.
fn unnamed<T: JsonSchema>() -> Shape {
    Box::new(|schemas| T::json_schema(schemas))
}

/// A page of a list.
pub fn page_of<T: JsonSchema>() -> Shape {
    Box::new(|schemas| {
        let items = schemas.subschema_for::<Vec<T>>();
        json_schema!({
            "type": "object",
            "required": ["items", "next"],
            "properties": {
                "items": items,
                "next": {"description": "The `cursor` of the next page; null at the end."},
            },
        })
    })
}

/// The fields of both.
pub fn both(one: Shape, other: Shape) -> Shape {
    Box::new(move |schemas| json_schema!({"allOf": [one(schemas), other(schemas)]}))
}

/// One or the other.
pub fn either(one: Shape, other: Shape) -> Shape {
    Box::new(move |schemas| json_schema!({"anyOf": [one(schemas), other(schemas)]}))
}

/// An object with these fields, which it always has.
#[macro_export]
macro_rules! object {
    ($($name:literal: $of:ty),* $(,)?) => {
        $crate::openapi::object(vec![$(($name, $crate::openapi::of::<$of>())),*])
    };
}

/// See [`crate::object!`].
pub fn object(fields: Vec<(&'static str, Shape)>) -> Shape {
    Box::new(move |schemas| {
        let names: Vec<&str> = fields.iter().map(|(name, _)| *name).collect();
        let properties: Map<String, Value> =
            fields.iter().map(|(name, of)| ((*name).to_owned(), of(schemas).to_value())).collect();
        json_schema!({"type": "object", "required": names, "properties": properties})
    })
}

/// How a caller proves who it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Proof {
    /// As the table of access rules says.
    Token,
    /// In no way.
    Open,
    /// With one of these security schemes.
    Own(&'static [&'static str]),
}

/// What a request carries.
pub(super) struct Body {
    pub media_types: &'static [&'static str],
    pub shape: Option<Shape>,
    pub required: bool,
}

/// What an answer carries.
pub(super) struct Answer {
    pub status: u16,
    pub text: &'static str,
    pub media_type: &'static str,
    pub shape: Option<Shape>,
}

/// One method of one route.
pub struct Operation {
    pub method: &'static str,
    /// As the router has it, with `/v1`.
    pub path: &'static str,
    pub(super) summary: &'static str,
    pub(super) proof: Proof,
    pub(super) query: Option<Shape>,
    /// Names of parameters that a caller may give several times, and their meaning.
    pub(super) texts: Vec<(&'static str, &'static str, &'static str)>,
    pub(super) body: Option<Body>,
    pub(super) answers: Vec<Answer>,
    pub(super) refusals: Vec<u16>,
}

impl Operation {
    fn new(method: &'static str, path: &'static str, summary: &'static str) -> Operation {
        Operation {
            method,
            path,
            summary,
            proof: Proof::Token,
            query: None,
            texts: Vec::new(),
            body: None,
            answers: Vec::new(),
            refusals: Vec::new(),
        }
    }

    /// `GET`, with a sentence about what it gives.
    pub fn get(path: &'static str, summary: &'static str) -> Operation {
        Operation::new("GET", path, summary)
    }

    /// `POST`.
    pub fn post(path: &'static str, summary: &'static str) -> Operation {
        Operation::new("POST", path, summary)
    }

    /// `PUT`.
    pub fn put(path: &'static str, summary: &'static str) -> Operation {
        Operation::new("PUT", path, summary)
    }

    /// `DELETE`.
    pub fn delete(path: &'static str, summary: &'static str) -> Operation {
        Operation::new("DELETE", path, summary)
    }

    /// The parameters of the query: the fields of the type that the handler reads.
    pub fn query<Q: JsonSchema>(mut self) -> Operation {
        self.query = Some(unnamed::<Q>());
        self
    }

    /// One more parameter, a text: its name, where it is (`header`, `query`), and what it means.
    pub fn text(mut self, name: &'static str, place: &'static str, means: &'static str) -> Operation {
        self.texts.push((name, place, means));
        self
    }

    /// A body of JSON, which the handler needs.
    pub fn body<B: JsonSchema>(mut self) -> Operation {
        self.body = Some(Body { media_types: &["application/json"], shape: Some(of::<B>()), required: true });
        self
    }

    /// A body of JSON that may be left out.
    pub fn body_if_any<B: JsonSchema>(self) -> Operation {
        let mut operation = self.body::<B>();
        if let Some(body) = &mut operation.body {
            body.required = false;
        }
        operation
    }

    /// A body of other media types.
    pub fn bytes(mut self, media_types: &'static [&'static str]) -> Operation {
        self.body = Some(Body { media_types, shape: None, required: true });
        self
    }

    /// An answer of JSON that is a success.
    pub fn answers(mut self, status: StatusCode, text: &'static str, shape: Shape) -> Operation {
        let (status, shape) = (status.as_u16(), Some(shape));
        self.answers.push(Answer { status, text, media_type: "application/json", shape });
        self
    }

    /// 200 with this type.
    pub fn shows<T: JsonSchema>(self) -> Operation {
        self.answers(StatusCode::OK, "as described", of::<T>())
    }

    /// 200 with a page of these.
    pub fn lists<T: JsonSchema>(self) -> Operation {
        self.answers(StatusCode::OK, "a page", page_of::<T>())
    }

    /// An answer of another media type, or (if that is empty) without a body.
    pub fn answers_bytes(
        mut self,
        status: StatusCode,
        text: &'static str,
        media_type: &'static str,
    ) -> Operation {
        self.answers.push(Answer { status: status.as_u16(), text, media_type, shape: None });
        self
    }

    /// Refusals beyond those that every operation of this kind has ([`Operation::statuses`]).
    pub fn refuses(mut self, statuses: &[StatusCode]) -> Operation {
        self.refusals.extend(statuses.iter().map(StatusCode::as_u16));
        self
    }

    /// How the caller proves who it is, where that is not the bearer token.
    pub fn proved_by(mut self, proof: Proof) -> Operation {
        self.proof = proof;
        self
    }

    /// Every status of a refusal.
    pub(super) fn statuses(&self) -> Vec<u16> {
        let mut statuses = self.refusals.clone();
        if self.proof != Proof::Open {
            // 400: also for a header that names no space. 503: the database is away.
            statuses.extend([400, 401, 403, 503]);
        }
        if self.path.contains('{') {
            statuses.push(404);
        }
        match self.method {
            // 408 and 413: the body. 409 and 422: also for a key of another request.
            "POST" => statuses.extend([408, 409, 413, 422, 429]),
            "PUT" => statuses.extend([408, 409, 413, 429]),
            "DELETE" => statuses.push(409),
            _ => {}
        }
        statuses.sort_unstable();
        statuses.dedup();
        statuses
    }
}
