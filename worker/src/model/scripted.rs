//! model/scripted
