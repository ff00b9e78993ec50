//! Pictures: numbers laid out as places in an SVG. The templates draw them; the policy of the pages forbids styles inline, so
//! every place is an attribute.

mod line;
mod share;
mod spark;
mod tries;
mod waterfall;

pub(crate) use line::{Bars, Line};
pub(crate) use share::Shares;
pub(crate) use spark::Spark;
pub(crate) use tries::{Tries, Try};
pub(crate) use waterfall::{Known, Waterfall};
