//! Puts the text of the step commit's statement together, with its parameters.
//!
//! The builder of one commit writes scalars ("$1::text"), the builder of several writes arrays, one value for each
//! commit. So one text serves any number of commits, and Postgres plans it once.

use super::rows::Rows;
use sqlx::error::BoxDynError;
use sqlx::postgres::{PgArguments, PgHasArrayType};
use sqlx::{Encode, Postgres, Type};
use std::fmt::{Display, Write};

/// What most statements have at most: parameters, bytes of their values for each commit, and bytes of their text.
const PARAMETERS: usize = 64;
const VALUE_BYTES: usize = 6 << 10;
pub(super) const TEXT_BYTES: usize = 8 << 10;

/// A statement that is being put together.
pub(super) struct Statement<'c> {
    pub(super) commits: &'c [&'c Rows],
    pub(super) arguments: PgArguments,
    pub(super) failed: Option<BoxDynError>,
    /// The columns of `given`: of a lone commit "$1::text as session_id, …", of several "$1::text[], …".
    pub(super) given: String,
    /// Of several commits, the names of these columns.
    pub(super) names: String,
    /// Parameters that are keys of tables.
    pub(super) session_ids: usize,
    pub(super) job_ids: usize,
    pub(super) run_ids: usize,
    /// The CTE before `s`, if there is one.
    pub(super) before: String,
    /// More of `s`: what it sets, and what it demands.
    pub(super) sets: String,
    pub(super) demands: String,
    /// The CTEs after `b`.
    pub(super) parts: String,
    pub(super) writes_step: bool,
    pub(super) writes_intent: bool,
    pub(super) starts_calls: bool,
}

impl<'c> Statement<'c> {
    pub(super) fn new(commits: &'c [&'c Rows]) -> Statement<'c> {
        let mut arguments = PgArguments::default();
        sqlx::Arguments::reserve(&mut arguments, PARAMETERS, VALUE_BYTES * commits.len());
        Statement {
            commits,
            arguments,
            failed: None,
            given: String::with_capacity(TEXT_BYTES / 4),
            names: String::with_capacity(if commits.len() > 1 { TEXT_BYTES / 8 } else { 0 }),
            session_ids: 0,
            job_ids: 0,
            run_ids: 0,
            before: String::new(),
            sets: String::with_capacity(TEXT_BYTES / 8),
            demands: String::new(),
            parts: String::with_capacity(TEXT_BYTES),
            writes_step: false,
            writes_intent: false,
            starts_calls: false,
        }
    }

    pub(super) fn alone(&self) -> bool {
        self.commits.len() == 1
    }

    pub(super) fn some(&self, has: impl Fn(&'c Rows) -> bool) -> bool {
        self.commits.iter().any(|commit| has(commit))
    }

    /// Whether the text has a part that most statements of several commits have. Those have it in any case, though Postgres then
    /// executes an insert without rows: so the lanes know a few texts and not one for each mixture, and Postgres parses and plans
    /// only these.
    pub(super) fn usual(&self, has: impl Fn(&'c Rows) -> bool) -> bool {
        !self.alone() || self.some(has)
    }

    /// Whether the text may rest on something that every commit has. One of several commits never does, as in [`Self::usual`].
    pub(super) fn all(&self, has: impl Fn(&'c Rows) -> bool) -> bool {
        self.alone() && self.commits.iter().all(|commit| has(commit))
    }

    /// Adds a parameter and returns its number.
    pub(super) fn bind<'v, T: Encode<'v, Postgres> + Type<Postgres>>(&mut self, value: T) -> usize {
        if let Err(error) = sqlx::Arguments::add(&mut self.arguments, value) {
            self.failed = Some(error);
        }
        sqlx::Arguments::len(&self.arguments)
    }

    /// Adds a column of `given`, one value for each commit, and returns its parameter's number.
    pub(super) fn given<T>(&mut self, name: &str, sql_type: &str, value: impl Fn(&'c Rows) -> T) -> usize
    where
        T: Encode<'c, Postgres> + Type<Postgres> + PgHasArrayType,
        Vec<T>: Encode<'c, Postgres>,
    {
        let comma = if self.given.is_empty() { "" } else { ", " };
        if self.alone() {
            let number = self.bind(value(self.commits[0]));
            let _ = write!(self.given, "{comma}${number}::{sql_type} as {name}");
            number
        } else {
            let values: Vec<T> = self.commits.iter().map(|commit| value(commit)).collect();
            let number = self.bind(values);
            let _ = write!(self.given, "{comma}${number}::{sql_type}[]");
            let _ = write!(self.names, "{name}, ");
            number
        }
    }

    /// The condition that a table's key is one of a column of `given`. It repeats a join, with parameters: so a plan
    /// looks these rows up by an index, even if it was made while the table was small.
    pub(super) fn among(&self, key: &str, sql_type: &str, number: usize) -> String {
        if self.alone() {
            format!("{key} = ${number}::{sql_type}")
        } else {
            format!("{key} = any (${number}::{sql_type}[])")
        }
    }

    /// The column by which the CTEs join a commit's rows. Of a lone commit there is one row. A member's number is compared
    /// faster than a session's id, and it is the first column: Postgres takes a row apart only as far as it reads it.
    pub(super) fn key(&self) -> &'static str {
        if self.alone() { "session_id" } else { "member" }
    }

    /// The condition of [`Statement::among`] for a lone commit, and none for several: for a table whose rows are looked up
    /// by a join with `b` in any plan. An index that is asked for a key and for a list looks the whole list up for each key.
    pub(super) fn of_lone(&self, key: &str, sql_type: &str, number: usize) -> String {
        if self.alone() { format!("{} and ", self.among(key, sql_type, number)) } else { String::new() }
    }

    /// The rows of one kind, which several parts of the commits may have.
    pub(super) fn rows<R>(&self, of: impl Fn(&'c Rows) -> &'c [R]) -> Columns<'c, R> {
        let rows = self
            .commits
            .iter()
            .zip(1..)
            .flat_map(|(commit, member)| of(commit).iter().map(move |row| (member, row)));
        Columns { rows: rows.collect(), numbers: String::new(), names: String::new() }
    }

    /// Adds a column to rows of one kind, and returns its parameter's number.
    pub(super) fn column<R, T>(
        &mut self,
        rows: &mut Columns<'c, R>,
        name: &str,
        sql_type: &str,
        value: impl Fn(&'c R) -> T,
    ) -> usize
    where
        T: Encode<'c, Postgres> + Type<Postgres> + PgHasArrayType,
        Vec<T>: Encode<'c, Postgres>,
    {
        let values: Vec<T> = rows.rows.iter().map(|(_, row)| value(row)).collect();
        let number = self.bind(values);
        let comma = if rows.names.is_empty() { "" } else { ", " };
        let _ = write!(rows.numbers, "{comma}${number}::{sql_type}[]");
        let _ = write!(rows.names, "{comma}{name}");
        number
    }

    /// Joins `b` with its rows of one kind, numbered by `ordinal`: "b, unnest(…) as r (…)".
    pub(super) fn joined<R>(&mut self, mut rows: Columns<'c, R>) -> String {
        if self.alone() {
            return format!("b, unnest({}) with ordinality as r ({}, ordinal)", rows.numbers, rows.names);
        }
        let mut ordinal = 0;
        let mut last = 0;
        let ordinals: Vec<i64> = rows
            .rows
            .iter()
            .map(|(member, _)| {
                ordinal = if *member == last { ordinal + 1 } else { 1 };
                last = *member;
                ordinal
            })
            .collect();
        let members: Vec<i64> = std::mem::take(&mut rows.rows).iter().map(|(member, _)| *member).collect();
        let (ordinals, members) = (self.bind(ordinals), self.bind(members));
        // What is joined comes first: Postgres takes a row apart only as far as it reads it.
        format!(
            "b join unnest(${members}::bigint[], ${ordinals}::bigint[], {}) as r (member, ordinal, {}) on r.member = b.member",
            rows.numbers, rows.names
        )
    }

    pub(super) fn part(&mut self, text: impl Display) {
        let _ = write!(self.parts, ", {text}");
    }
}

/// Rows of one kind, each with the number of its commit, and their columns so far.
pub(super) struct Columns<'c, R> {
    rows: Vec<(i64, &'c R)>,
    /// "$1::bigint[], …"
    numbers: String,
    names: String,
}
