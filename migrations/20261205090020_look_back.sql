-- When the search last looked for sessions that its sweeps had missed, because the clock of the host that made them is behind.
alter table search_progress add column looked_back_at timestamptz not null default '-infinity';
comment on column search_progress.looked_back_at is
    'When sessions were last looked for whose ids are older than the sweeps read: the clock of their host is behind.';
