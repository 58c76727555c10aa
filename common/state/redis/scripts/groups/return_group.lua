-- uses: groups
-- Removes a group that cannot train. Callers are its shard while it is open, or the trainer that
-- leased it and found it invalid or uninformative. In the latter case its failed members are
-- counted apart.
local previous = previous_reply()
if previous then return previous end
if not has_lease(args.name, args.token) then return reject_fenced(args.name) end
local row = read_hash(group_key(args.group))
local is_holder = row.state == 'open' and row.shard == args.name
  or row.state == 'leased' and tonumber(row.trainer_token) == args.token
if not is_holder then
  return reject('refused', 'group ' .. args.group .. ' is not open at or leased to ' .. args.name)
end
return_group(args.group, row, args.requeue)
local failed = args.counter == 'filtered' and row.samples - row.scored or 0
add_count(args.counter, row.samples - failed)
add_count('typed_drops', failed)
if args.kind == 'stale' then
  append_event('stale', {job = args.job,
    version = tonumber(redis.call('HGET', JOB .. ':job', 'version')),
    groups = {{group = args.group, prompt = tonumber(row.prompt), samples = tonumber(row.samples),
      min_version = tonumber(row.min_version)}}})
  return reply({returned = true})
end
append_event(args.kind, {job = args.job, group = args.group, prompt = tonumber(row.prompt),
  samples = row.samples - failed, failed = failed, reason = args.reason, by = args.name})
return reply({returned = true})
