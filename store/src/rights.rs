//! The rights that work needs, and which of them the role of this connection lacks. `deploy/roles.sql` gives them to
//! `wakeful_runtime`; `tests/roles.rs` compares the two.

use crate::{Result, Store};

/// Tables that work only reads.
const READ: [&str; 4] = ["_sqlx_migrations", "schema_serves", "installation", "erasures"];

/// Tables that get rows, which then stay as they are.
const LOGS: [&str; 3] = ["conversation_records", "session_events", "audit_log"];

/// Tables whose rows change.
const KEPT: [&str; 25] = [
    "absurd_imports",
    "api_tokens",
    "batch_members",
    "batch_proofs",
    "batches",
    "blobs",
    "conversation_counters",
    "conversation_sessions",
    "deliveries",
    "error_groups",
    "legacy_chat_counts",
    "legal_holds",
    "mails",
    "provider_gates",
    "run_failures",
    "sealed_blobs",
    "search_documents",
    "search_progress",
    "search_sessions",
    "session_inbox",
    "session_runs",
    "session_seed_messages",
    "session_steps",
    "signing_keys",
    "tool_calls",
];

/// Tables whose rows go away when they are done.
const PASSING: [&str; 19] = [
    "act_links",
    "blob_removals",
    "error_hours",
    "generation_chunks",
    "generations",
    "idempotency_keys",
    "jobs",
    "notification_groups",
    "notification_members",
    "notifications",
    "notify_conditions",
    "pauses",
    "queue_samples",
    "schedule_firings",
    "schedules",
    "search_due",
    "transitions",
    "webhook_tokens",
    "workers",
];

/// Sequences that rows take their numbers from.
const SEQUENCES: [&str; 5] =
    ["delivery_ordinals", "leases", "liveness_locks", "pause_numbers", "session_ordinals"];

/// What the role lacks of one table, sequence or schema.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lacking {
    /// Such as `jobs`, or `schema public`.
    pub of: String,
    /// Such as `delete`.
    pub rights: Vec<String>,
}

/// All rights that the role lacks, and its name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Lacked {
    pub role: String,
    pub of: Vec<Lacking>,
}

impl Store {
    /// Returns the rights that work needs and that the role of the pool's connections lacks. A table that is not there is left out:
    /// the check of the schema finds that.
    ///
    /// # Errors
    /// [`crate::Error::Database`].
    pub async fn lacked_rights(&self) -> Result<Lacked> {
        let tables: Vec<(&str, &[&str])> = [
            (&READ[..], &["select"][..]),
            (&LOGS[..], &["select", "insert"][..]),
            (&KEPT[..], &["select", "insert", "update"][..]),
            (&PASSING[..], &["select", "insert", "update", "delete"][..]),
            (&SEQUENCES[..], &["usage"][..]),
        ]
        .into_iter()
        .flat_map(|(names, rights)| names.iter().map(move |name| (*name, rights)))
        .collect();
        let (names, rights): (Vec<String>, Vec<String>) = tables
            .into_iter()
            .flat_map(|(name, rights)| rights.iter().map(move |right| (name.to_owned(), (*right).to_owned())))
            .unzip();
        // A schema that the role may not use is not in its search path, and none of its tables has a name there.
        let rows = sqlx::query!(
            r#"
            with here as (
                select n.oid, n.nspname::text as name, has_schema_privilege(n.oid, 'usage') as usable
                from pg_namespace n
                where n.nspname = coalesce(current_schema(), 'public')
            ), needed as (
                select here.usable, c.oid, c.relkind, c.relname::text as name, wanted.privilege
                from unnest($1::text[], $2::text[]) as wanted (name, privilege)
                cross join here
                join pg_class c on c.relname = wanted.name and c.relnamespace = here.oid
            )
            select current_user::text as "role!", array(
                select 'schema ' || here.name || ':usage' from here where not here.usable
                union all
                select n.name || ':' || string_agg(n.privilege, ',' order by n.privilege)
                from needed n
                where case
                    when not n.usable then false
                    when n.relkind = 'S' then not has_sequence_privilege(n.oid, n.privilege)
                    else not has_table_privilege(n.oid, n.privilege)
                end
                group by n.name
                order by 1
            ) as "lacked!"
            "#,
            &names,
            &rights
        )
        .fetch_one(&self.pool)
        .await?;
        let of = rows.lacked.iter().filter_map(|one| one.split_once(':')).map(|(of, rights)| Lacking {
            of: of.to_owned(),
            rights: rights.split(',').map(str::to_owned).collect(),
        });
        Ok(Lacked { role: rows.role, of: of.collect() })
    }
}
