//! What came from a conversation.

use crate::Result;
use sqlx::PgConnection;

/// These conversations with their forks, the imports of their sessions, and all that came from those, in the order of their ids.
pub(super) async fn tree(tx: &mut PgConnection, roots: &[String]) -> Result<Vec<String>> {
    Ok(sqlx::query_scalar!(
        r#"with recursive imported as materialized (
            -- Read once. A policy keeps what is in the column from any index.
            select conversation_id, imported_from ->> 'session_id' as original
            from conversation_sessions
            where imported_from is not null
        ), tree (id) as (
            select unnest($1::text[])
            union
            select found.id
            from tree
            -- "offset 0" has Postgres look for each by its index, however many it expects.
            cross join lateral (
                (select conversation_id as id from conversation_counters where parent_conversation_id = tree.id offset 0)
                union all
                select imported.conversation_id
                from (
                    select session_id from conversation_sessions where conversation_id = tree.id offset 0
                ) original
                join imported on imported.original = original.session_id
            ) found
        )
        select id as "id!" from tree order by id"#,
        roots
    )
    .fetch_all(tx)
    .await?)
}
