//! A controller that another process goes on with: what it is, is data.

mod admin;
mod refusals;
mod same;
