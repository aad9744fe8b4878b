//! Flexible Data Placement: what is offered, where writes count, what is refused, and what the next
//! process finds.

mod commands;
mod host;
mod lasting;
mod says;
