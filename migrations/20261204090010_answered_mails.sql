-- Whoever writes a mail names who gets the answer: as its sender, or in Reply-To. Answers to one person are counted, whoever asked
-- for them.

alter table mails add column answered_key text;
comment on column mails.answered_key is 'Stands for the address that gets the answer; null for a mail that was dropped or has no sender, and for older ones.';
