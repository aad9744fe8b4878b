//! Tests of documents and messages: pages are generated from the code or agree with it.

mod error_texts;
mod readme;
mod reference;
