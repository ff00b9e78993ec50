-- What is asked for each message, and deleted each hour, is found by an index.

create index notifications_of_group on notifications (group_id, through_member);
create index notification_groups_closed on notification_groups (closed_at) where closed_at is not null;
create index act_links_expired on act_links (expires_at);
create index act_links_of_message on act_links (notification_id);
