//! tool/files
