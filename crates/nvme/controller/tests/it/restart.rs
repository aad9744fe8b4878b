//! A controller that another process continues: its state is data.

mod admin;
mod refusals;
mod same;
