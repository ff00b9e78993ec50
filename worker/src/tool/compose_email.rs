//! tool/compose_email
