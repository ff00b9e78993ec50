//! tool/current_time
