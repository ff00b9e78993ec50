//! Lets statements run on the pool: `.fetch_one(&pool)`.

use super::{Pool, server};
use futures::future::BoxFuture;
use futures::stream::{self, BoxStream, StreamExt, TryStreamExt};
use sqlx::postgres::{PgConnection, PgQueryResult, PgRow, PgStatement, PgTypeInfo, Postgres};
use sqlx::{Either, Execute, Executor, SqlStr};

type Result<T> = std::result::Result<T, sqlx::Error>;

/// Runs one statement on a connection of the pool.
macro_rules! run {
    ($pool:expr, |$connection:ident| $statement:expr) => {{
        let pool = Pool::clone($pool);
        Box::pin(async move {
            let mut lent = pool.acquire().await?;
            let $connection: &mut PgConnection = lent.sends();
            let answer = server::in_time($statement).await;
            lent.answered(&answer);
            answer
        })
    }};
}

impl<'p> Executor<'p> for &'_ Pool {
    type Database = Postgres;

    fn execute<'e, 'q: 'e, E>(self, query: E) -> BoxFuture<'e, Result<PgQueryResult>>
    where
        'p: 'e,
        E: 'q + Execute<'q, Postgres>,
    {
        run!(self, |connection| connection.execute(query))
    }

    /// Reads all rows before it returns the first, so that no reader keeps a connection.
    fn fetch_many<'e, 'q: 'e, E>(self, query: E) -> BoxStream<'e, Result<Either<PgQueryResult, PgRow>>>
    where
        'p: 'e,
        E: 'q + Execute<'q, Postgres>,
    {
        let all: BoxFuture<'e, Result<Vec<_>>> =
            run!(self, |connection| connection.fetch_many(query).try_collect());
        stream::once(all).map_ok(|rows| stream::iter(rows.into_iter().map(Ok))).try_flatten().boxed()
    }

    fn fetch_optional<'e, 'q: 'e, E>(self, query: E) -> BoxFuture<'e, Result<Option<PgRow>>>
    where
        'p: 'e,
        E: 'q + Execute<'q, Postgres>,
    {
        run!(self, |connection| connection.fetch_optional(query))
    }

    fn prepare_with<'e>(self, sql: SqlStr, parameters: &'e [PgTypeInfo]) -> BoxFuture<'e, Result<PgStatement>>
    where
        'p: 'e,
    {
        run!(self, |connection| connection.prepare_with(sql, parameters))
    }

    fn describe<'e>(self, sql: SqlStr) -> BoxFuture<'e, Result<sqlx::Describe<Postgres>>>
    where
        'p: 'e,
    {
        run!(self, |connection| connection.describe(sql))
    }
}
