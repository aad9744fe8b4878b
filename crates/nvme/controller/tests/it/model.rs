//! Models of what a process leaves to the next one: every order of steps of the host, of the
//! process and of its deaths is tried, and a model without one of the rules must go wrong.

mod admin;
mod explore;
mod queues;
