//! A message's JSON as a row has it: read at once, or still sealed.

use crate::Result;
use crate::encryption::{Seal, may_be_sealed};
use crate::json::from_text;
use serde::de::DeserializeOwned;
use sqlx::error::BoxDynError;
use sqlx::postgres::{PgTypeInfo, PgValueRef};
use sqlx::{Decode, Postgres, Type, TypeInfo};

/// A value of a column of type `json`.
#[derive(Debug)]
pub(super) enum Stored<T> {
    Read(T),
    /// It may have sealed values in it, so it is kept as it came.
    Sealed(String),
}

impl<T> Type<Postgres> for Stored<T> {
    fn type_info() -> PgTypeInfo {
        PgTypeInfo::with_name("json")
    }

    fn compatible(ty: &PgTypeInfo) -> bool {
        ty.name().eq_ignore_ascii_case("json")
    }
}

impl<'r, T: DeserializeOwned> Decode<'r, Postgres> for Stored<T> {
    fn decode(value: PgValueRef<'r>) -> std::result::Result<Self, BoxDynError> {
        let text = value.as_str()?;
        if may_be_sealed(text) {
            return Ok(Stored::Sealed(text.to_owned()));
        }
        Ok(Stored::Read(serde_json::from_str(text)?))
    }
}

impl<T: DeserializeOwned> Stored<T> {
    /// Returns the value. Opens it first if it is sealed; in a session without a key it is read as it is.
    pub fn open(self, what: &'static str, seal: &Seal) -> Result<T> {
        match self {
            Stored::Read(value) => Ok(value),
            Stored::Sealed(text) => from_text(what, &seal.open_json(text)?),
        }
    }
}
