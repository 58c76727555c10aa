-- uses: readers
-- Records that a reader has saved all events up to `cursor`. A job's recorder has also saved the
-- rows of steps up to `step`. With `has_left` the reader no longer holds back the trimming of
-- events.
local row = read_reader(args.name)
local job = string.match(args.name, '^recorder/(.+)$')
if not row and job and redis.call('ZSCORE', MESH .. ':jobs:deleted', job)
  and redis.call('EXISTS', '{' .. job .. '}:job') == 0 then
  return cjson.encode({}) -- the job was deleted, and its recorder still runs
end
row = row or {joined_ms = NOW}
row.cursor, row.done, row.location, row.last_seen_ms, row.has_left = args.cursor, args.cursor,
  args.location, NOW, args.has_left or nil
row.step = args.step
write_reader(args.name, row)
return cjson.encode({})
