//! model/openai
