//! A pair of the two sides.

use serde::Serialize;

/// The same value for both sides.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Sides<T> {
    pub left: T,
    pub right: T,
}
