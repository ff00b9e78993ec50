//! Pictures: numbers laid out as places in an SVG. The templates draw them; the policy of the pages forbids styles inline, so
//! every place is an attribute.

mod line;
mod waterfall;

pub(crate) use line::{Bars, Line};
pub(crate) use waterfall::Waterfall;
